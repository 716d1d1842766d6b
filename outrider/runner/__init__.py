"""One step on the device: row state, inputs, forward, finish, draft.

Start-up:

1. Steps of dead tokens run through a model with one layer of each kind, to tell which kernels may be needed. Their
   launches are only collected, and forked processes start to compile each kernel as soon as it is collected
   (`kernels/gpu/launch/precompile.py`). The largest of these steps shows, before any kernel runs, how much memory a
   step takes; the pool gets the rest.
2. The weights are read while forks compile: the formats of the layers, which are declared from the files' headers,
   decide which kernels there are, so the model is blank until then (`Worker.load`). With a drafter from outside, which
   may look at the target's weights, the files are read first.
3. Decode steps are captured, and the costs of steps and proposals are measured. A launch waits only until its
   own kernel is compiled.
4. Steps with prompts come last, because their kernels take longest to compile. Meanwhile the libraries that later
   captures need are loaded (`StepGraphs.load_while`). The engine is ready when all kernels are loaded; `-v` prints
   the seconds of each part.
5. The heap is frozen (`engine/collector.py`): a full garbage collection would otherwise look at the objects of all
   imported libraries, for 80 to 140 ms, and stall every request.
"""
