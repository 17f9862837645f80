// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

var helpChecks = []check{
	{name: "HelpAlone", wirings: everywhere, meets: true, run: checkHelpAlone},
	{name: "HelpTogether", wirings: everywhere, meets: true, run: checkHelpTogether},
	{name: "HelpNothing", wirings: everywhere, meets: true, run: checkHelpNothing},
	{name: "HelpStopped", wirings: everywhere, meets: true, run: checkHelpStopped},
	{name: "HelpThenSleep", wirings: everywhere, meets: true, run: checkHelpThenSleep},
	{name: "HelpBesideSleeper", wirings: everywhere, meets: true, run: checkHelpBesideSleeper},
}

// helpers is how many goroutines help at once.
const helpers = 3

// help offers a hand for one tag and returns whether there was something to do.
func (s *stage) help(tag uint64, stop <-chan struct{}) (did bool) {
	s.Helper()
	_ = s.inTime("Help", func() error {
		did = s.peer.Help(tag, stop)
		return nil
	})
	return did
}

// helping has goroutines help with all tags, in any order and over and over, at
// least once, until the function that it returns is called.
func (s *stage) helping(tags []uint64) (stop func()) {
	var wg sync.WaitGroup
	wg.Add(helpers)
	ending := make(chan struct{})
	end := sync.OnceFunc(func() { close(ending) })
	s.Cleanup(end)
	for i := range helpers {
		errands.run(func() {
			defer wg.Done()
			random := rand.New(rand.NewPCG(uint64(i), 1))
			for first := true; first || !stopped(ending); first = false {
				for _, at := range random.Perm(len(tags)) {
					s.peer.Help(tags[at], ending)
				}
			}
		})
	}
	return func() {
		s.Helper()
		end()
		_ = s.inTime("end of Help", func() error { wg.Wait(); return nil })
	}
}

// checkHelpAlone helps with each batch as soon as it is submitted, as a
// goroutine does that waits for it.
func checkHelpAlone(s *stage) {
	size := uint64(big)
	l, r := s.local(size), s.remote(size)
	did := 0
	for round := range 40 {
		op := bothOps[round%2]
		d := s.batch(l, r, []uint64{64, 70000, 1 << 20, big}[round/2%4])
		tag := s.submit(op, d...)
		if s.help(tag, nil) {
			did++
		}
		s.ok(s.await(tag), "%v of %d bytes with help", op, d[0].Len)
		s.apply(op, d...)
		if round%5 == 4 {
			s.compare(l, r, fmt.Sprintf("%v of %d bytes with help", op, d[0].Len))
			l.paint(s.seed())
		}
	}
	s.Logf("%d of 40 batches were still to be had", did)
}

// checkHelpTogether has many goroutines help with the same batches at once, some
// of which carry messages: all complete once, and messages keep their order.
func checkHelpTogether(s *stage) {
	const count = 12
	n := uint64(1 << 20)
	l, r := s.local(n*count), s.remote(n*count)
	for round := range 6 {
		var tags []uint64
		var sent [][]byte
		for i := range uint64(count) {
			op := bothOps[i/2%2]
			d := s.pieces(desc(l, i*n, r, i*n, n))
			d = d[:min(len(d), s.caps.DescsMax)]
			if op == driver.Write && s.can(driver.CanNotify) {
				msg := []byte{byte(round), byte(i)}
				tags = append(tags, s.submitNotify(msg, d...))
				sent = append(sent, msg)
			} else {
				tags = append(tags, s.submit(op, d...))
			}
			s.apply(op, d...)
		}
		stop := s.helping(tags)
		for i, tag := range tags {
			if err := s.await(tag); err != nil {
				s.Errorf("batch %d with help: %v", i, err)
			}
		}
		stop()
		s.messages("of batches with help", s.far, sent)
		s.compare(l, r, "after help by many")
		for _, tag := range tags {
			if s.help(tag, nil) {
				s.Error("Help with a batch that is done says that it did something")
			}
		}
		l.paint(s.seed())
	}
}

// checkHelpNothing helps where there is nothing to do.
func checkHelpNothing(s *stage) {
	l, r := s.local(64), s.remote(64)
	for round := range 3 {
		for _, tag := range []uint64{0, 1, 1 << 63, firstTag, firstTag + 1000, ^uint64(0)} {
			for _, stop := range []chan struct{}{nil, make(chan struct{})} {
				if s.help(tag, stop) {
					s.Errorf("round %d: Help with nothing in flight says that it did something",
						round)
				}
			}
		}
		s.move(driver.Write, desc(l, 0, r, 0, l.size))
	}
	if err := s.inTime("close peer", s.peer.Close); err != nil {
		s.Errorf("close peer: %v", err)
	}
	if s.help(firstTag, nil) {
		s.Error("Help of a closed peer says that it did something")
	}
}

// checkHelpStopped stops helping at once: the batch goes on without.
func checkHelpStopped(s *stage) {
	size := uint64(big)
	l, r := s.local(size), s.remote(size)
	stop := make(chan struct{})
	close(stop)
	for range 12 {
		d := s.batch(l, r, size)
		tags := []uint64{s.submit(driver.Write, d...), s.submit(driver.Write, d...)}
		for range 3 {
			s.help(tags[1], stop)
		}
		for _, tag := range tags {
			s.ok(s.await(tag), "write whose helper stopped")
		}
		s.apply(driver.Write, d...)
		s.compare(l, r, "after a helper stopped")
		l.paint(s.seed())
	}
}

// checkHelpThenSleep helps, polls and sleeps, as the engine does: what the helper
// left to others must wake it.
func checkHelpThenSleep(s *stage) {
	n := uint64(1 << 20)
	l, r := s.local(n), s.remote(n)
	stop := make(chan struct{})
	close(stop)
	for i := range 300 {
		d := s.batch(l, r, []uint64{4096, 70000, 300000, 1 << 20}[i%4])
		tag := s.submit(driver.Write, d...)
		if i%3 == 0 {
			s.help(tag, stop)
		} else {
			s.help(tag, nil)
		}
		s.sleepUntil(fmt.Sprintf("completion %d after help", i), s.isDone(tag))
		s.apply(driver.Write, d...)
	}
	s.compare(l, r, "after help and sleep")
}

// checkHelpBesideSleeper helps while a goroutine sleeps that armed before. A helper that says that
// it did nothing does not poll: what it ended all the same must wake the sleeper.
func checkHelpBesideSleeper(s *stage) {
	n := uint64(300000)
	l, r := s.local(n), s.remote(n)
	slept := 0
	for i := range 300 {
		for ready := true; ready; {
			var err error
			ready, err = s.near.b.Arm()
			s.ok(err, "arm")
			if _, err := s.near.ledger.poll(); err != nil {
				s.Fatalf("poll: %v", err)
			}
		}
		d := s.batch(l, r, []uint64{64, 4096, 300000}[i%3])
		op := bothOps[i/2%2]
		tag := s.submit(op, d...)
		s.apply(op, d...)
		done := s.isDone(tag)
		if n, _ := s.near.ledger.poll(); n == 0 && !s.help(tag, nil) && !done() {
			// the submitter polls, too
			slept++
			s.sleepArmed(fmt.Sprintf("%v %d beside a helper that did nothing", op, i))
		}
		s.ok(s.await(tag), "%v with help", op)
	}
	s.compare(l, r, "after help beside a sleeper")
	s.Logf("%d of 300 batches woke the sleeper", slept)
}

// sleepArmed sleeps on what was armed before, until something is there.
func (s *stage) sleepArmed(what string) {
	s.Helper()
	fd := s.near.b.FD()
	switch err := sleepOn(fd, s.h.Limit/2); {
	case errors.Is(err, errLate):
		if n, _ := s.near.ledger.poll(); n > 0 {
			s.Fatalf("%s: it has ended, and no sleeper was woken for %v", what, s.h.Limit/2)
		}
		s.hang(what)
	case err != nil:
		s.Fatalf("%s: %v", what, err)
	}
}
