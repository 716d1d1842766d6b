"""Ranks of one engine on several machines ("nodes"). No torch here.

    node 0                                            node 1
    engine, WorkerProcess                             HostAgent: `outrider serve --node-rank 1`
      |-- RankPipe, RemoteProcess -- HostLink ==TCP== Channel -- RankRelay --|
      |-- pipe -- rank 0                                        rank 1 -- pipe

Node 0 has the engine and the front. Every other node runs an agent, which connects to node 0, shows what it runs
(`node_facts`), starts its ranks as processes of its own and passes messages between them and node 0. Ranks use pipes
and shared memory as on one machine; only the agents and node 0 know of the network. Sums of tensors do not go this way:
the ranks' torch.distributed group connects them directly (`runner/rank_group.py`).

`meeting` waits for the nodes before anything is loaded, `host_link` is node 0's side of a connection, `host_agent` the
other side, and `channel` authenticates both: everything that a peer without the secret sends is dropped unread.
"""
