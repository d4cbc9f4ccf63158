"""Which machines of a cluster a job goes to: no network, no clock."""
