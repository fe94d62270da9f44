"""What is known of a session's next turn before it comes: for engines that keep states, and to read prompts ahead."""
