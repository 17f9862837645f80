// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"errors"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// closedBackend tries what a closed backend must refuse.
func (s *stage) closedBackend(seg driver.Segment) {
	s.Helper()
	connect := func(addr []byte) func() error {
		return func() error {
			return s.bounded("connect", time.Second, func(ctx context.Context) error {
				_, err := s.near.b.Connect(ctx, addr)
				return err
			})
		}
	}
	for name, f := range map[string]func() error{
		"Register":           func() error { _, err := s.near.b.Register(seg); return err },
		"Connect":            connect(s.farAddr),
		"Connect to oneself": connect(s.near.b.Addr()),
		"Poll":               func() error { _, err := s.near.ledger.poll(); return err },
	} {
		if err := s.inTime(name+" after Close", f); !errors.Is(err, driver.ErrClosed) {
			s.Errorf("%s after Backend.Close: %v, want %v", name, err, driver.ErrClosed)
		}
	}
}

// refuseClosed tries what a peer must refuse once it, or its backend, is closed:
// every way to submit, with keys that are known and such as are not.
func (s *stage) refuseClosed(after string, r *memory, known driver.Desc) {
	s.Helper()
	calls := map[string]func() error{
		"Import": func() error { _, _, err := s.peer.Import(r.token); return err },
	}
	for what, d := range map[string]driver.Desc{"": known, " of unknown keys": {Len: 1,
		LocalKey: 1 << 31, RemoteKey: 1 << 31}} {
		submits := map[string]func(uint64) error{"Submit" + what: s.submitting(driver.Write, d)}
		if s.can(driver.CanNotify) {
			submits["Submit with a message"+what] = s.notifying([]byte("must not arrive"), d)
			submits["Submit of a message alone"] = s.notifying([]byte("must not arrive"))
		}
		if s.can(driver.CanPattern) {
			p := &driver.Pattern{Count: 1, Run: d.Len, LocalKey: d.LocalKey, RemoteKey: d.RemoteKey}
			submits["Submit of a pattern"+what] = s.scattering(driver.Read, p)
		}
		for name, submit := range submits {
			calls[name] = func() error { return s.refusal(submit) }
		}
	}
	for name, f := range calls {
		if err := s.inTime(name+" after "+after, f); !errors.Is(err, driver.ErrClosed) {
			s.Errorf("%s after %s: %v, want %v", name, after, err, driver.ErrClosed)
		}
	}
}

// afterClose calls what the contract leaves open after Close: it must return,
// and not panic.
func (s *stage) afterClose(m driver.Memory, r *memory) {
	s.Helper()
	_ = s.inTime("calls after Close", func() error {
		s.near.b.Caps()
		s.near.b.Addr()
		m.Key()
		_, _ = m.AppendToken(nil)
		_ = m.Revoke(context.Background())
		s.peer.Drop(r.as)
		_ = s.peer.Close()
		_, _ = s.near.b.Arm()
		_ = s.near.b.Answer(1, nil)
		s.peer.Can()
		s.peer.Conn()
		s.peer.Explain(m.Key(), r.as)
		s.peer.Lost()
		s.peer.Help(firstTag, nil)
		s.peer.Cancel(firstTag)
		_, _ = s.near.look(make([]driver.Message, 1))
		return nil
	})
}

// closedPeer tries what a closed peer must refuse.
func (s *stage) closedPeer(l, r *memory) {
	s.Helper()
	s.refuseClosed("Peer.Close", r, desc(l, 0, r, 0, 64))
	if err := s.inTime("close peer again", s.peer.Close); err != nil &&
		!errors.Is(err, driver.ErrClosed) {
		s.Errorf("close peer again: %v", err)
	}
	s.peer.Drop(r.as) // ignored
}
