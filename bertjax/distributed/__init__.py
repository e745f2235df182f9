"""Hosts, device meshes, sharding rules, topologies of TPUs and GPUs, transfers between host and devices."""
