// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

var hammerChecks = []check{
	{name: "Hammer", wirings: everywhere, meets: true, run: checkHammer},
	{name: "HammerClose", wirings: here, meets: true, run: checkHammerClose},
}

// hammerTime is long enough for the race detector to see every pair of calls, and hammerRounds is
// what each goroutine does also where the machine stands still meanwhile.
const hammerTime, hammerRounds = 300 * time.Millisecond, 8

// checkHammer calls everything that any goroutine may call at any time at once:
// two that move bytes and look at them, and others that import, register,
// connect and revoke beside them.
func checkHammer(s *stage) {
	n := uint64(64 << 10)
	beside := s.remote(n)
	seg := s.near.region(s.local(n).id).seg
	jobs := []func() error{
		s.mover(s.local(n), s.remote(n)), s.mover(s.local(n), s.remote(n)),
		s.importer(beside), s.registrar(seg), s.connecter(),
	}
	if s.wiring != Processes {
		jobs = append(jobs, s.revokeBeside(s.far.share(n)))
	}
	s.together(jobs)
}

// together repeats all jobs side by side until time is up, and some rounds are done, or one fails.
func (s *stage) together(jobs []func() error) {
	s.Helper()
	var wg sync.WaitGroup
	end := time.Now().Add(hammerTime)
	for _, job := range jobs {
		wg.Add(1)
		errands.run(func() {
			defer wg.Done()
			for i := 0; (i < hammerRounds || time.Now().Before(end)) && !s.Failed(); i++ {
				if err := job(); err != nil {
					s.Error(err)
				}
			}
		})
	}
	// A job under way at the end may wait twice, and uses memory that a check which is over gives
	// back.
	if err := within(hammerTime+4*s.h.Limit, func() error { wg.Wait(); return nil }); err != nil {
		s.hang("goroutines side by side")
	}
}

// mover writes, reads back into another place and compares.
func (s *stage) mover(l, r *memory) func() error {
	half := l.size / 4
	at := uint64(0)
	return func() error {
		at = (at*7 + 977) % half
		write := desc(l, at, r, at, half)
		read := desc(l, 2*half+at%half, r, at, half)
		for _, step := range []struct {
			op driver.Op
			d  driver.Desc
		}{{driver.Write, write}, {driver.Read, read}} {
			descs := s.pieces(step.d)
			tag, err := s.near.submit(s.peerID, step.op, descs[:min(len(descs), s.caps.DescsMax)],
				nil)
			if err != nil {
				return fmt.Errorf("submit: %w", err)
			}
			if err := s.near.ledger.await(tag, s.h.Limit); err != nil {
				return fmt.Errorf("%v: %w", step.op, err)
			}
		}
		sent, err := s.near.get(l.id, write.Local, half)
		if err != nil {
			return err
		}
		got, err := s.near.get(l.id, read.Local, half)
		if err != nil {
			return err
		}
		if s.caps.DescsMax >= len(s.pieces(write)) && !bytes.Equal(got, sent) {
			return fmt.Errorf(promise.Mark+"read back what was written: %s", difference(got, sent))
		}
		return nil
	}
}

func (s *stage) importer(r *memory) func() error {
	return func() error {
		key, size, err := s.peer.Import(r.token)
		if err != nil || size != r.size {
			return fmt.Errorf("import: size %d, %w", size, err)
		}
		s.peer.Drop(key)
		return nil
	}
}

func (s *stage) registrar(seg driver.Segment) func() error {
	return func() error {
		seg.Secret = secret()
		m, err := s.near.b.Register(seg)
		if err != nil {
			return fmt.Errorf("register: %w", err)
		}
		if _, err := m.AppendToken(nil); err != nil {
			return fmt.Errorf("token: %w", err)
		}
		return m.Revoke(context.Background())
	}
}

func (s *stage) connecter() func() error {
	return func() error {
		if s.can(driver.CanNotify) && s.wiring != Processes {
			// What ends here is announced to the far side, which must look.
			_, _ = s.far.party.(*host).look(make([]driver.Message, 8))
		}
		id, err := s.near.connect(s.farAddr, s.h.Limit)
		if err != nil {
			return fmt.Errorf("connect: %w", err)
		}
		time.Sleep(time.Millisecond)
		return s.near.peer(id).Close()
	}
}

// revokeBeside imports and revokes parts of memory that no other goroutine uses.
func (s *stage) revokeBeside(m *memory) func() error {
	far := s.far.party.(*host)
	return func() error {
		id, err := far.slice(m.id, 0, m.size, nil)
		if err != nil {
			return fmt.Errorf("register: %w", err)
		}
		token, err := far.token(id)
		if err != nil {
			return err
		}
		key, _, err := s.peer.Import(token)
		if err != nil {
			return fmt.Errorf("import: %w", err)
		}
		s.peer.Drop(key)
		if err := far.revoke(id, s.h.Limit); err != nil {
			return fmt.Errorf("revoke: %w", err)
		}
		return nil
	}
}

// checkHammerClose closes the backend in the midst of all that: each call either
// works or says that it is closed.
func checkHammerClose(s *stage) {
	n := uint64(256 << 10)
	l, r := s.local(n), s.remote(n)
	d := s.batch(l, r, n)
	seg := s.near.region(l.id).seg
	jobs := []func() error{
		func() error { _, err := s.near.submit(s.peerID, driver.Write, d, nil); return err },
		func() error { _, err := s.near.submit(s.peerID, driver.Read, d, nil); return err },
		s.registrar(seg), s.importer(r),
		func() error { _, err := s.near.ledger.poll(); return err },
		func() error { time.Sleep(50 * time.Millisecond); return s.near.b.Close() },
	}
	for i, job := range jobs {
		jobs[i] = func() error {
			err := job()
			if errors.Is(err, driver.ErrClosed) || errors.Is(err, driver.ErrNotSupported) ||
				errors.Is(err, driver.ErrPeerLost) || errors.Is(err, driver.ErrBounds) {
				time.Sleep(time.Millisecond)
				return nil // a closed memory is unknown, too
			}
			return err
		}
	}
	s.together(jobs)
}

// descriptors counts the open descriptors of this process.
func descriptors(tb testing.TB) int {
	tb.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatalf("count descriptors: %v", err)
	}
	return len(entries)
}
