"""What formats of pages cost in nats, and the plan of a day on a GPU."""
