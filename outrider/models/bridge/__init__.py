"""The bridge: models that no family here serves, run by transformers' own modelling code on the engine's token rows.

`installed` finds the class and refuses by name what cannot be served. `outline` runs it once without memory and writes
down its attention layers. `replace` puts layers of this package in the place of the modules that `known` recognises.
`model` is the `Model` that the engine runs. Only `registry` imports this, when a config asks for it: transformers is an
extra of the package.
"""
