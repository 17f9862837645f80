// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// crimes are misdeeds against a second process.
var crimes = []struct {
	name   string
	checks []string
	how    sabotage
}{
	{"takes a frozen writer for gone", []string{"FenceFrozen", "FenceStress"}, sabotage{
		fence: func(b *saboteur, ctx context.Context, key uint32) error {
			ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
			defer cancel()
			if err := b.Backend.Fence(ctx, key); !errors.Is(err, context.DeadlineExceeded) {
				return err
			}
			return nil
		},
	}},
	{"does not fence at all", []string{"FenceStress", "FenceOverFrozen"}, sabotage{
		fence: func(*saboteur, context.Context, uint32) error { return nil },
	}},
	{"waits for a frozen writer for ever", []string{"FenceFrozen"}, sabotage{
		fence: func(b *saboteur, ctx context.Context, key uint32) error {
			begin := time.Now()
			err := b.Backend.Fence(ctx, key)
			if time.Since(begin) > 20*time.Millisecond {
				<-ctx.Done()
				return ctx.Err()
			}
			return err
		},
	}},
	{"renews a page that others write to, and tells nothing", []string{"FenceFrozenBeside"},
		sabotage{
			fence: func(b *saboteur, ctx context.Context, key uint32) error {
				if err := b.Backend.Fence(ctx, key); err != nil {
					return err
				}
				b.mu.Lock()
				seg := b.mapped[key]
				b.mu.Unlock()
				all := seg.Shared.(*hostmem.Buffer).Bytes()
				page := all[(seg.SharedOff+seg.Len)&^4095:][:4096]
				for range 10 { // what is written between the copies is lost, as to old pages
					old := bytes.Clone(page)
					time.Sleep(100 * time.Microsecond)
					copy(page, old)
				}
				return nil
			},
		}},
	{"renews what lies between the ranges", []string{"FenceFrozenOnly"}, sabotage{
		fence: func(b *saboteur, ctx context.Context, key uint32) error {
			err := b.Backend.Fence(ctx, key)
			b.mu.Lock()
			seg := b.mapped[key]
			b.mu.Unlock()
			if err != nil || seg.Only == nil {
				return err
			}
			all := seg.Shared.(*hostmem.Buffer).Bytes()
			page := all[seg.SharedOff+seg.Only[0].Off+seg.Only[0].Len:][:4096]
			for range 100 { // what is written between the copies is lost, as to old pages
				old := bytes.Clone(page)
				time.Sleep(time.Millisecond)
				copy(page, old)
			}
			return nil
		},
	}},
	{"says nothing of a killed sender", []string{"LastMessage"}, sabotage{
		receive: func(b *saboteur, msgs []driver.Message) (int, error) {
			n, err := b.Backend.Receive(msgs)
			if n > 0 && msgs[n-1].Err != nil {
				n--
			}
			return n, err
		},
	}},
	{"does not see that a peer was killed", []string{"PeerKilled"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			err := p.Peer.Submit(tag, b)
			if errors.Is(err, driver.ErrPeerLost) {
				p.b.mu.Lock()
				p.b.stash = append(p.b.stash, driver.Completion{Tag: tag})
				p.b.mu.Unlock()
				return nil
			}
			return err
		},
		poll: pollStash,
	}},
	{"gives up a peer that is silent", []string{"PeerSilent"}, sabotage{
		lost: func(*saboteurPeer) <-chan struct{} { return past },
	}},
	{"serves a peer that was silent no more", []string{"PeerSilent"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			if p.b.every(2) {
				return driver.ErrPeerLost
			}
			return p.Peer.Submit(tag, b)
		},
	}},
	{"waits for a frozen peer in Close", []string{"PeerFrozen"}, sabotage{
		closePeer: func(p *saboteurPeer) error {
			time.Sleep(time.Second)
			return p.Peer.Close()
		},
	}},
	{"waits for a frozen process in Connect", []string{"ConnectFrozen"}, sabotage{
		connect: func(b *saboteur, ctx context.Context, addr []byte) (driver.Peer, error) {
			p, err := b.dial(ctx, addr)
			if err != nil {
				time.Sleep(time.Second)
			}
			return p, err
		},
	}},
}

// TestCrimes proves that the checks with a frozen or killed process can fail.
func TestCrimes(t *testing.T) {
	for _, c := range crimes {
		t.Run(c.name, func(t *testing.T) {
			for _, name := range c.checks {
				notices(t, find(t, name), sabotagedShm(c.how), Processes)
			}
		})
	}
}

// TestNoCrime proves that the wrapper alone is none.
func TestNoCrime(t *testing.T) {
	h := sabotagedShm(sabotage{})
	h.Limit = shmHarness.Limit // not the short one with which crimes are found soon
	h = h.withDefaults()
	for _, name := range []string{
		"FenceFrozen", "FenceFrozenBeside", "FenceStress", "LastMessage", "ArmLost", "PeerKilled",
		"PeerFrozen", "PeerSilent", "ConnectFrozen",
	} {
		t.Run(name, func(t *testing.T) { find(t, name).perform(t, h, Processes) })
	}
}
