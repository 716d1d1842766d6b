"""Grammars: structured outputs (`SamplingParams.structured_outputs`), compiled by llguidance. A form is the JSON
schema, regex, list of choices or grammar that a request's text must follow.

| file | what it is |
|---|---|
| `compiler.py` | has requested forms tested and compiled (`GrammarCompiler`) |
| `leases.py` | the engine's keeper (`FormLeases`): which compiled forms are kept, and for which requests |
| `form_lease.py` | the request's part (`FormLease`), and how requests with a form fail |
| `rows.py` | the step's part (`GrammarRows`): matchers of rows, masks, and drafts of forced text |
| `compiled_forms.py` | forms that are compiled in a worker, their matchers and their masks |
| `errands.py` | errands to a worker: read the vocabulary, compile a form, drop one |
| `on_device.py`, `in_engine.py` | the feature's parts in the worker and in the engine, which make the above |

Behind the compiler: `trial.py` tries new forms in the process of `compile_process.py` (its program is
`compile_program.py`), in turns (`turns.py`) and on threads (`check_threads.py`) of each tenant, within `limits.py`.
`texts.py`, `schemas.py` and `structural.py` write a form as the text of a grammar. `matcher.py` follows one output.
`answer_rules.py` serves fronts, which write grammars of whole answers. No file here is loaded before a request asks for
a form. llguidance is an optional package (`outrider[grammar]`), imported when the first form is compiled.

The way of a form, from a request to the device and back:

1. `RequestChecks` finds that the parameters ask for the feature and calls `GrammarsInEngine.part_maker`. A new form is
   tried in the compile process, where it can be stopped. One that stays within its limits is compiled in the workers,
   by the errand `CompileForm`. The request gets a `FormLease`, which says `masks_tokens`.
2. `FormLeases.enter` counts the lease when the engine adds the request. A leased form is never dropped, so no step
   compiles one.
3. The scheduler splits a batch if a request with masks samples in it. `GrammarRows.admit` begins to make the row's
   matcher.
4. Before the forward pass is queued, the rows' last tokens and drafts are copied to the host (`prepare`). While the
   pass runs, matchers follow the tokens of the previous step and fill a mask for every logit row, up to the first
   draft that is not allowed (`turn`). The sampler forbids the tokens that the masks leave out, after all other edits.
   Text that a form forces becomes a host draft.
5. When the request ends, it gives up the lease. The form stays compiled until there are too many.
"""
