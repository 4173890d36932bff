"""The back end of torch that sends messages: chosen by a setting, and tested where torch does not bring it."""
