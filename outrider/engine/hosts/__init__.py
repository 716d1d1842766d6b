"""Runs the ranks of one engine on several machines ("nodes"). No torch.

    node 0                                            node 1
    engine, WorkerProcess                             HostAgent: `outrider serve --node-rank 1`
      |-- RankPipe, RemoteProcess -- HostLink ==TCP== Channel -- RankRelay --|
      |-- pipe -- rank 0                                        rank 1 -- pipe

Node 0 runs the engine and the server. Every other node runs an agent. The agent connects to node 0, sends its versions
and settings (`node_facts`), starts its ranks as child processes, and passes messages between them and node 0. Ranks use
pipes and shared memory as on one machine; only node 0 and the agents use the network connection. All-reduces of tensors
do not use it: the ranks' torch.distributed group connects them directly (`runner/rank_group.py`).

`meeting` waits for the nodes before anything is loaded, `host_link` is node 0's side of a connection, `host_agent` the
other side, and `channel` authenticates both: data from a peer without the secret is dropped unread."""
