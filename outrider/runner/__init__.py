"""One step on the device: row state, inputs, forward, finish, draft."""
