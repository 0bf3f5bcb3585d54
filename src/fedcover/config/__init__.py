"""Settings of runs (`schema`), of policies (`policy_settings`), and the federation that they describe (`build`)."""
