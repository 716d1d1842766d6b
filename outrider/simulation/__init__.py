"""Simulation of an engine's capacity. The scheduler, the cache and the choice of drafts are the real ones; the device
is simulated, and its steps take the time that a measured cost table gives. No torch.

`outrider bench costs` writes the table (`CostTable`) as JSON, in which objects have their class under `is`:

    format      `outrider costs 1`
    model       ModelFacts: sizes of the model, bandwidth and operations per second of the device; ranks need them
    info        WorkerInfo: limits, cache layout, number of pages, the costs by which the scheduler chooses drafts
                (`drafting`) and bounds steps with prompts (`prompt_steps`)
    host        HostCosts: seconds of the engine's thread for a step, for each request in it, and at a request's start
    decoding    DecodeSteps of each number of drafts: seconds by the number of requests, without what contexts add.
                Measured behind 512 tokens on average on a GPU, with lengths as servers have them; behind 32 on a CPU
    prompts     PromptSteps for no drafts and for the most: seconds by the number of tokens, without attention. Captured
                steps are padded: their tokens up to `padded_up_to`, their requests to `requests`
    reading     seconds for each token of context of a request that decodes, or of its last `window` tokens. On a GPU
                the first 512 tokens of a context cost more each than those behind them
    attending   seconds for each pair of a prompt's token and a key that it sees
    acceptance  rates by position, if acceptance was synthetic while the table was measured
    submits_early, enable_prefix_caching   settings of the engine

Values between two measured points are interpolated; beyond the last point the last slope goes on. A step with prompts
takes the time of all its tokens together, or that of decoding alone if that is longer, plus attention and contexts.

A simulated engine makes the turns of `Engine.step`, with as many steps in flight. Turns in which all running requests
only decode are made many at a time (`sched/decode_run.py`), with the numbers and pages of `--step-by-step`; not while
requests wait, with drafts, or for models with recurrent layers. `ranks.py` estimates the table of several ranks.
"""
