"""The HTTP front between the network and an application, used by `headstart serve` and by feature
servers. It bounds what a client costs, before and after its token is checked."""
