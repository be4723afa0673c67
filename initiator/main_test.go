package initiator_test

import "log/slog"

var discard = slog.New(slog.DiscardHandler)
