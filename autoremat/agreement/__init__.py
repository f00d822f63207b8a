"""Lets the processes of a distributed job compile a shared graph alike, by messages in the job's key-value store."""
