package initiator

// For the tests in package initiator_test, which run against package target.
var (
	Play       = play
	FinishPlay = finishPlay
	NewRand    = newRand
	TestLogger = testLogger
)

// Answers is how many requests of a player have been answered.
func (p *player) Answers() int64 { return p.answers.Load() }

// Windows reports whether the session's commands go through memory windows.
func (s *Session) Windows() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.as.lanes[0].windows
}

// InCapsuleSent is how many commands of queue 0 took their data along.
func (s *Session) InCapsuleSent() (n uint64) {
	s.mu.Lock()
	l := s.as.lanes[0]
	s.mu.Unlock()
	_ = l.w.Call(func() { n = l.inCapsuleSent })
	return n
}
