"""What a plugin implements, one module a kind. The ABCs here are called in the loop; records choose between them."""
