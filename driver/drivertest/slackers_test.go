// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// slackers are misdeeds of a Helper.
var slackers = []struct {
	name   string
	checks []string
	how    sabotage
}{
	{"completes what it helped with once more", []string{"HelpAlone", "HelpTogether",
		"HelpStopped"}, sabotage{
		submit: remembered,
		help: func(p *saboteurPeer, tag uint64, _ <-chan struct{}) bool {
			// the first time only: who helps over and over would drown Poll
			ok := p.b.pass(tag, helped)
			if ok {
				p.b.put(driver.Completion{Tag: tag})
			}
			return ok
		},
		poll: pollStash,
	}},
	{"always says that it helped", []string{"HelpNothing", "HelpTogether"}, sabotage{
		help: func(*saboteurPeer, uint64, <-chan struct{}) bool { return true },
	}},
	{"waits for something to help with", []string{"HelpNothing"}, sabotage{
		help: func(*saboteurPeer, uint64, <-chan struct{}) bool {
			dawdle()
			return false
		},
	}},
	{"copies after the completion", []string{"HelpAlone"}, sabotage{
		submit: remembered,
		help: func(p *saboteurPeer, tag uint64, _ <-chan struct{}) bool {
			return p.b.pass(tag, helped)
		},
		poll: func(b *saboteur, done []driver.Completion) (int, error) {
			return pollAnd(b, done, func(_ driver.Completion, f flight) {
				if f.stages&helped != 0 && f.Op == driver.Read {
					f.Descs[0].Local++
					f.Descs[0].Len--
					b.later(time.Millisecond, f.land)
				}
			})
		},
	}},
	{"copies after a cancel", []string{"CancelWrite"}, sabotage{
		submit: kept,
		cancel: cancelKept,
		help: func(p *saboteurPeer, tag uint64, _ <-chan struct{}) bool {
			p.b.landIfBoth(tag, helped)
			return false
		},
		poll: func(b *saboteur, done []driver.Completion) (int, error) {
			return pollAnd(b, done, func(c driver.Completion, _ flight) {
				b.landIfBoth(c.Tag, ended)
			})
		},
	}},
	{"copies after a close", []string{"PeerClose"}, sabotage{
		submit: remembered,
		help: func(p *saboteurPeer, tag uint64, _ <-chan struct{}) bool {
			p.b.landIfBoth(tag, helped)
			return false
		},
		closePeer: func(p *saboteurPeer) error {
			err := p.Peer.Close()
			for _, tag := range p.tags() {
				p.b.landIfBoth(tag, ended) // what succeeded too: nothing may land now
			}
			return err
		},
	}},
	{"drops a batch when it is stopped", []string{"HelpStopped"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			p.remember(tag, b)
			p.b.atPoll(func() error { // so that help always comes before
				f, _ := p.b.recall(tag)
				if f.stages&helped != 0 {
					return nil
				}
				return p.Peer.Submit(tag, &f.Batch)
			})
			return nil
		},
		help: func(p *saboteurPeer, tag uint64, stop <-chan struct{}) bool {
			if stopped(stop) {
				p.b.pass(tag, helped)
			}
			return true
		},
		poll: pollLazily,
	}},
	{"says nothing of what ended in its hands", []string{"HelpBesideSleeper"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			p.remember(tag, b)
			return nil
		},
		help: func(p *saboteurPeer, tag uint64, _ <-chan struct{}) bool {
			if f, ok := p.b.recall(tag); ok {
				f.land()
				p.b.put(driver.Completion{Tag: tag})
			}
			return false
		},
		poll: pollStash,
	}},
	{"does not wake for what a helper left", []string{"HelpThenSleep"}, sabotage{
		help: func(p *saboteurPeer, _ uint64, _ <-chan struct{}) bool { return p.b.every(1) },
		arm: func(b *saboteur) (bool, error) {
			b.mu.Lock()
			helped := b.count > 0
			b.count = 0
			b.mu.Unlock()
			if helped {
				return false, nil
			}
			return b.Backend.Arm()
		},
	}},
}

// TestSlackers proves that the checks of helpers can fail.
func TestSlackers(t *testing.T) {
	if raceEnabled {
		t.Log("not run with the race detector, which notices first")
		return
	}
	for _, m := range slackers {
		t.Run(m.name, func(t *testing.T) {
			for _, name := range m.checks {
				notices(t, find(t, name), sabotaged(m.how), Pair)
			}
		})
	}
}
