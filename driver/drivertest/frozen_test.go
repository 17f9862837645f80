// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// crimes are misdeeds against a second process.
var crimes = []struct {
	name   string
	checks []string
	late   bool // the finding is that something takes too long
	how    sabotage
}{
	{"takes a frozen writer for gone", []string{"FenceFrozen", "FenceStress"}, false, sabotage{
		revoke: func(m *saboteurMemory, ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
			defer cancel()
			if err := m.Memory.Revoke(ctx); !errors.Is(err, context.DeadlineExceeded) {
				return err
			}
			return nil
		},
	}},
	{"does not revoke at all", []string{"FenceStress", "FenceOverFrozen"}, true, sabotage{
		revoke: func(*saboteurMemory, context.Context) error { return nil },
	}},
	{"waits for a frozen writer for ever", []string{"FenceFrozen"}, true, sabotage{
		revoke: func(m *saboteurMemory, ctx context.Context) error {
			begin := time.Now()
			err := m.Memory.Revoke(ctx)
			if time.Since(begin) > 20*time.Millisecond {
				<-ctx.Done()
				return ctx.Err()
			}
			return err
		},
	}},
	{"renews a page that others write to, and tells nothing", []string{"FenceFrozenBeside"},
		false, sabotage{
			revoke: func(m *saboteurMemory, ctx context.Context) error {
				if err := m.Memory.Revoke(ctx); err != nil {
					return err
				}
				seg := m.seg
				all := seg.Shared.(*hostmem.Buffer).Bytes()
				if at := (seg.SharedOff + seg.Len) &^ 4095; at+4096 <= uint64(len(all)) {
					return putAnonymous(all[at:][:4096])
				}
				return nil
			},
		}},
	{"renews what lies between the ranges", []string{"FenceFrozenOnly"}, false, sabotage{
		revoke: func(m *saboteurMemory, ctx context.Context) error {
			err := m.Memory.Revoke(ctx)
			seg := m.seg
			if err != nil || seg.Only == nil {
				return err
			}
			all := seg.Shared.(*hostmem.Buffer).Bytes()
			undo(all[seg.SharedOff+seg.Only[0].Off+seg.Only[0].Len:][:4096])
			return nil
		},
	}},
	{"says nothing of a killed sender", []string{"LastMessage"}, true, sabotage{
		receive: func(b *saboteur, msgs []driver.Message) (int, error) {
			n, err := b.Backend.Receive(msgs)
			if n > 0 && msgs[n-1].Err != nil {
				n--
			}
			return n, err
		},
	}},
	{"does not see that a peer was killed", []string{"PeerKilled"}, true, sabotage{
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
	{"gives up a peer that is silent", []string{"PeerSilent"}, false, sabotage{
		lost: func(*saboteurPeer) <-chan struct{} { return past },
	}},
	{"serves a peer that was silent no more", []string{"PeerSilent"}, false, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			if p.b.every(2) {
				return driver.ErrPeerLost
			}
			return p.Peer.Submit(tag, b)
		},
	}},
	{"waits for a frozen peer in Close", []string{"PeerFrozen"}, true, sabotage{
		closePeer: func(p *saboteurPeer) error {
			dawdle()
			return p.Peer.Close()
		},
	}},
	{"waits for a frozen process in Connect", []string{"ConnectFrozen"}, true, sabotage{
		connect: func(b *saboteur, ctx context.Context, addr []byte) (driver.Peer, error) {
			p, err := b.dial(ctx, addr)
			if err != nil {
				dawdle()
			}
			return p, err
		},
	}},
}

// putAnonymous puts a page in the place of another, with its bytes: what other processes write goes
// to the old one from then on.
func putAnonymous(page []byte) error {
	old := bytes.Clone(page)
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_FIXED | unix.MAP_PRIVATE |
		unix.MAP_ANONYMOUS
	if _, _, errno := unix.Syscall6(unix.SYS_MMAP, addressOf(page), uintptr(len(page)), prot, flags,
		^uintptr(0), 0); errno != 0 {
		return errno
	}
	copy(page, old)
	return nil
}

// undo takes back what the program writes to a page, again and again: it is lost, as in an old
// page. A program that has noticed writes no more.
func undo(page []byte) {
	for range 50 {
		old := bytes.Clone(page)
		for looks := 0; bytes.Equal(page, old); looks++ {
			if looks == 100 {
				return
			}
			time.Sleep(time.Millisecond)
		}
		copy(page, old)
	}
}

// TestCrimes proves that the checks with a frozen or killed process can fail.
func TestCrimes(t *testing.T) {
	for _, c := range crimes {
		t.Run(c.name, func(t *testing.T) {
			for _, name := range c.checks {
				notices(t, find(t, name), sabotagedShm(c.how, c.late), Processes)
			}
		})
	}
}

// TestNoCrime proves that the wrapper alone is none.
func TestNoCrime(t *testing.T) {
	h := sabotagedShm(sabotage{}, false).withDefaults()
	for _, name := range []string{
		"FenceFrozen", "FenceFrozenBeside", "FenceStress", "LastMessage", "ArmLost", "PeerKilled",
		"PeerFrozen", "PeerSilent", "ConnectFrozen",
	} {
		t.Run(name, func(t *testing.T) { find(t, name).perform(t, h, Processes) })
	}
}
