"""What several tests use: a server, waiting for facts, tiny models. Nothing of the package lives here."""
