// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

var connectChecks = []check{
	{name: "ConnectNonsense", wirings: here, run: checkConnectNonsense},
	{name: "ConnectContext", wirings: everywhere, run: checkConnectContext},
	{name: "ConnectGone", wirings: Pair | Processes, run: checkConnectGone},
	{name: "ConnectFrozen", wirings: Processes, run: checkConnectFrozen},
	{name: "ConnectTwice", wirings: everywhere, run: checkConnectTwice},
}

// bounded runs f with a context that ends soon; f must follow.
func (s *stage) bounded(what string, ends time.Duration, f func(context.Context) error) error {
	s.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), ends)
	defer cancel()
	return s.inTime(what, func() error { return f(ctx) })
}

func (s *stage) connectTo(what string, addr []byte, ends time.Duration) {
	s.Helper()
	err := s.bounded(what, ends, func(ctx context.Context) error {
		p, err := s.near.b.Connect(ctx, addr)
		if err == nil {
			_ = p.Close()
		}
		return err
	})
	if err == nil {
		s.Errorf("%s: no error", what)
	}
}

func checkConnectNonsense(s *stage) {
	addr := s.farAddr
	for i := 0; i < len(addr); i += 1 + len(addr)/40 {
		what := fmt.Sprintf("connect to an address cut to %d of %d bytes", i, len(addr))
		s.connectTo(what, addr[:i:i], time.Second)
	}
	for _, nonsense := range [][]byte{
		nil, {0}, {0xff, 0xff}, make([]byte, 64),
		painted(64, 1), painted(driver.AddrMax, 2), painted(1<<16, 3),
	} {
		s.connectTo(fmt.Sprintf("connect to %d bytes of nonsense", len(nonsense)), nonsense,
			time.Second)
	}
	l, r := s.local(64), s.remote(64)
	s.move(driver.Write, desc(l, 0, r, 0, l.size))
	s.compare(l, r, "after connecting to nonsense")
}

// checkConnectContext ends the context after Connect has returned, and before.
func checkConnectContext(s *stage) {
	ctx, cancel := context.WithCancel(context.Background())
	p, err := s.near.b.Connect(ctx, s.farAddr)
	cancel()
	s.ok(err, "connect")
	defer p.Close()
	time.Sleep(10 * time.Millisecond)
	r := s.far.share(64)
	if _, _, err := p.Import(r.token); err != nil {
		s.Errorf("import after the context of Connect ended: %v", err)
	}
	err = s.inTime("connect with an ended context", func() error {
		p, err := s.near.b.Connect(ctx, s.farAddr)
		if err == nil {
			_ = p.Close() // in time is all that is asked for
		}
		return err
	})
	if err != nil && !errors.Is(err, context.Canceled) {
		s.Errorf("connect with an ended context: %v, want nil or %v", err, context.Canceled)
	}
}

// checkConnectGone connects to a backend that is no more.
func checkConnectGone(s *stage) {
	if s.proc != nil {
		s.ok(s.proc.kill())
	} else if err := s.far.party.(*host).b.Close(); err != nil {
		s.Fatalf("close: %v", err)
	}
	for range 3 {
		s.connectTo("connect to a backend that is gone", s.farAddr, time.Second)
	}
}

func checkConnectFrozen(s *stage) {
	s.ok(s.proc.freeze())
	s.connectTo("connect to a frozen process", s.farAddr, 100*time.Millisecond)
	s.ok(s.proc.thaw())
	l, r := s.local(64), s.remote(64)
	s.move(driver.Write, desc(l, 0, r, 0, l.size))
	s.connect()
}

// checkConnectTwice closes one of two peers; the other one must not notice.
func checkConnectTwice(s *stage) {
	n := uint64(1 << 20)
	l, r := s.local(n), s.remote(n)
	first := s.peer
	s.connect()
	s.imports(r)
	tag := s.submit(driver.Write, s.batch(l, r, n)...)
	if err := s.inTime("close peer", first.Close); err != nil {
		s.Errorf("close peer: %v", err)
	}
	if err := s.await(tag); err != nil {
		s.Errorf("write over one peer when another was closed: %v", err)
	}
	s.apply(driver.Write, s.batch(l, r, n)...)
	s.move(driver.Read, desc(l, 0, r, 0, 64))
	for len(s.drainMessages()) > 0 { // news of the first peer's end, with Self
	}
	s.compare(l, r, "after another peer was closed")
}

// drainMessages takes what the far side has received.
func (s *stage) drainMessages() []message {
	if !s.can(driver.CanNotify) {
		return nil
	}
	r, _ := s.far.try(request{Do: "receive", Count: 100, Limit: 20 * time.Millisecond})
	return r.Messages
}
