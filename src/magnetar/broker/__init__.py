"""Topics, producers, subscriptions and dispatch: the broker's heart, without sockets."""
