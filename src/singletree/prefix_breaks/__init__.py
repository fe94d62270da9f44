"""Why a prompt does not continue the one before: the causes of prefix breaks, and what tells them apart."""
