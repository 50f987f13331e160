"""All that depends on a release of torch or Thunder. Only this room uses Thunder's private names."""
