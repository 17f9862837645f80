// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"errors"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

var (
	errHalfClosed = errors.New("half closed")
	never, past   = make(chan struct{}), make(chan struct{})
	// silent is a pipe into which nothing is written.
	silent, unused, errSilent = os.Pipe()
)

func init() { close(past) }

// lapses are breaches of what the contract says of bounds, patterns, waking, and the lives of
// peers and backends.
var lapses = []struct {
	name   string
	checks []string
	how    sabotage
}{
	{"copies a byte too few", []string{"Reverse", "StaleToken"}, tooShort},
	{"stops short of the last run of a pattern", []string{"PatternMax"},
		patterns(func(p *driver.Pattern) { p.Count-- })},
	{"clamps a pattern", []string{"PatternBounds"}, sabotage{
		pattern: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			if err := p.Peer.Submit(tag, b); !errors.Is(err, driver.ErrBounds) {
				return err
			}
			return p.Peer.Submit(tag, empty())
		},
	}},
	{"follows a list that has changed since it was checked", []string{"PatternChanges"}, sabotage{
		pattern: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			err := p.Peer.Submit(tag, b)
			side := b.Pattern.Remote
			if err != nil || side.List == nil {
				return err
			}
			p.mu.Lock()
			mem := p.seen[b.Pattern.RemoteKey].Mem
			p.mu.Unlock()
			for range 1000 { // until the list leads out of the memory
				at := uint64(atomic.LoadUint32(&side.List[len(side.List)-1])) * side.Stride
				if at == uint64(len(mem)) {
					spoil(addressOf(mem) + uintptr(at))
					break
				}
				runtime.Gosched()
			}
			return nil
		},
	}},
	{"sends the message of a list that is out of bounds", []string{"BoundsNotify"}, sabotage{
		notify: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			if err := p.Peer.Submit(tag, b); !errors.Is(err, driver.ErrBounds) {
				return err
			}
			return p.Peer.Submit(tag, tailOf(b))
		},
	}},
	{"takes the token of closed memory", []string{"StaleToken"}, sabotage{
		imports: func(p *saboteurPeer, token []byte) (uint32, uint64, error) {
			key, size, err := p.admit(token)
			if err != nil {
				return key, uint64(len(token)), nil
			}
			return key, size, nil
		},
	}},
	{"allocates for a pattern", []string{"NoAllocationPattern"}, patterns(func(p *driver.Pattern) {
		p.Remote.List = slices.Clone(p.Remote.List)
	})},
	{"loses messages both ways", []string{"NotifyBothWays"}, sabotage{
		receive: func(b *saboteur, msgs []driver.Message) (int, error) {
			n, err := b.Backend.Receive(msgs)
			if n > 0 && b.every(5) {
				n--
			}
			return n, err
		},
	}},
	{"has a name in capitals", []string{"Caps"}, sabotage{
		caps: func(b *saboteur) driver.Caps {
			c := b.Backend.Caps()
			c.Name = "Mem"
			return c
		},
	}},
	{"hides patterns, but for their limit", []string{"Caps"},
		without(driver.CanPattern)},
	{"explains in two lines", []string{"Explain"}, sabotage{
		explain: func(p *saboteurPeer, local, remote uint32) string {
			return p.Peer.Explain(local, remote) + "\nand more"
		},
	}},
	{"panics at keys that are unknown", []string{"Explain"}, sabotage{
		explain: func(_ *saboteurPeer, local, _ uint32) string { return "way"[local>>28:] },
	}},
	{"never loses a peer", []string{"Lost"}, sabotage{
		lost: func(*saboteurPeer) <-chan struct{} { return never },
	}},
	{"has lost each peer from the beginning", []string{"Lost"}, sabotage{
		lost: func(*saboteurPeer) <-chan struct{} { return past },
	}},
	{"forgets descriptors", []string{"Churn"}, sabotage{
		connect: func(b *saboteur, ctx context.Context, addr []byte) (driver.Peer, error) {
			forgotten, err := os.Open(os.DevNull)
			if err != nil {
				return nil, err
			}
			litter.drop(forgotten)
			return b.dial(ctx, addr)
		},
	}},
	{"half closes", []string{"HammerClose"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			err := p.Peer.Submit(tag, b)
			if errors.Is(err, driver.ErrClosed) {
				return errHalfClosed
			}
			return err
		},
	}},
	{"ends a peer with the context of Connect", []string{"ConnectContext"}, sabotage{
		connect: func(b *saboteur, ctx context.Context, addr []byte) (driver.Peer, error) {
			p, err := b.dial(ctx, addr)
			if err == nil {
				context.AfterFunc(ctx, func() { _ = p.Close() })
			}
			return p, err
		},
	}},
	{"always says that something is there", []string{"ArmIdle"}, sabotage{
		arm: func(*saboteur) (bool, error) { return true, nil },
	}},
	{"has a descriptor that wakes for nothing", []string{"ArmStays"}, sabotage{
		fd: func(*saboteur) int { return int(silent.Fd()) },
	}},
	{"never wakes for room", []string{"ArmFull"}, sabotage{
		arm: func(*saboteur) (bool, error) { return false, nil },
	}},
	{"loses wake-ups", []string{"ArmPingPong", "AnswerPingPong"}, sabotage{
		arm: func(b *saboteur) (bool, error) {
			if b.every(5) {
				return false, nil
			}
			return b.Backend.Arm()
		},
	}},
}

// offences are misdeeds against a second process that is killed, or stands still.
var offences = []struct {
	name   string
	checks []string
	late   bool // the finding is that something takes too long
	how    sabotage
}{
	{"takes answers to the dead", []string{"AnswerKilled"}, true, sabotage{
		answer: func(b *saboteur, conn uint64, msg []byte) error {
			if err := b.Backend.Answer(conn, msg); !errors.Is(err, driver.ErrPeerLost) {
				return err
			}
			return nil
		},
	}},
	{"waits for a dead writer", []string{"FenceKilled"}, true, sabotage{
		revoke: func(m *saboteurMemory, ctx context.Context) error {
			dawdle()
			return m.Memory.Revoke(ctx)
		},
	}},
	{"lands a byte of a dead writer", []string{"FenceKilled"}, false, sabotage{
		revoke: func(m *saboteurMemory, ctx context.Context) error {
			m.b.later(10*time.Millisecond, func() { m.seg.Mem[0] ^= 0xff })
			return m.Memory.Revoke(ctx)
		},
	}},
	{"puts empty pages under a frozen reader", []string{"FenceFrozenReader"}, false, sabotage{
		revoke: func(m *saboteurMemory, ctx context.Context) error {
			clear(m.seg.Mem)
			return m.Memory.Revoke(ctx)
		},
	}},
}

var tooShort = sabotage{
	submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
		return p.Peer.Submit(tag, changed(b, func(d *driver.Desc) { d.Len = max(1, d.Len-1) }))
	},
}

// spoil changes a byte, if it is one of registered memory.
func spoil(address uintptr) {
	secrets.Range(func(_, seg any) bool {
		mem := seg.(driver.Segment).Mem
		at := address - addressOf(mem)
		if at >= uintptr(len(mem)) {
			return true
		}
		mem[at]++
		return false
	})
}

// patterns changes patterns on their way.
func patterns(change func(*driver.Pattern)) sabotage {
	return sabotage{pattern: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
		c, some := copied(b), *b.Pattern
		change(&some)
		c.Pattern = &some
		return p.Peer.Submit(tag, &c)
	}}
}

// TestLapses proves that the checks named can fail.
func TestLapses(t *testing.T) {
	require.NoError(t, errSilent)
	defer runtime.KeepAlive(unused)
	if raceEnabled {
		t.Log("not run with the race detector, which notices first")
		return
	}
	for _, l := range lapses {
		t.Run(l.name, func(t *testing.T) {
			for _, name := range l.checks {
				c, w := find(t, name), Pair
				if c.wirings&Pair == 0 {
					w = Self
				}
				notices(t, c, sabotaged(l.how), w)
			}
		})
	}
}

// TestOffences proves it of checks with a second process.
func TestOffences(t *testing.T) {
	for _, o := range offences {
		t.Run(o.name, func(t *testing.T) {
			for _, name := range o.checks {
				notices(t, find(t, name), sabotagedShm(o.how, o.late), Processes)
			}
		})
	}
}
