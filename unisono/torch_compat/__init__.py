"""The private names of torch that the library uses, each with its reason. A new version of torch may change them."""
