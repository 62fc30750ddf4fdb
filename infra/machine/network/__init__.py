"""Networks of nodes on this machine: namespaces on bridges, whose links carry so many bits a second and no more."""
