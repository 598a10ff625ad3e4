"""What stands between the network and an application: one HTTP front for `headstart serve` and for
feature servers. It bounds what a client costs before it has shown its token, and after."""
