"""What the server reports about answers: metrics, log lines, records and spans."""
