// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// breaches are misdeeds against what the contract says of bits, nests, connections, answers
// and of a revoke whose context is over.
var breaches = []struct {
	name   string
	checks []string
	how    sabotage
}{
	{"hides that it takes patterns", []string{"CanRefused"}, without(driver.CanPattern)},
	{"hides that it notifies", []string{"CanRefused"}, without(driver.CanNotify)},
	{"promises to be durable", []string{"DurableWrites"}, sabotage{
		can: func(p *saboteurPeer) driver.Can { return p.Peer.Can() | driver.CanDurable },
	}},
	{"changes its mind", []string{"CanConstant"}, sabotage{
		can: func(p *saboteurPeer) driver.Can {
			if p.b.every(2) {
				return p.Peer.Can() &^ driver.CanPattern
			}
			return p.Peer.Can()
		},
	}},
	{"leaves out the tail of a read", []string{"CanNever"}, sabotage{
		any: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			if b.Op == driver.Read && b.Tail != driver.NoTail {
				return p.Peer.Submit(tag, bytesOf(b))
			}
			return p.Peer.Submit(tag, b)
		},
	}},
	{"moves the descriptors beside a pattern", []string{"CanNever"}, sabotage{
		any: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			if len(b.Descs) > 0 && b.Pattern != nil {
				_ = p.Peer.Submit(tag, &driver.Batch{Op: b.Op, Descs: b.Descs})
			}
			return p.Peer.Submit(tag, b)
		},
	}},
	{"leaves out the innermost loop", []string{"Nest", "NestNotify"},
		nesting(func(p *driver.Pattern) {
			p.Loops = p.Loops[:max(0, len(p.Loops)-1)]
		})},
	{"begins with the first entry of a slot", []string{"Nest"}, nesting(func(p *driver.Pattern) {
		p.Local.First, p.Remote.First = 0, 0
	})},
	{"stops short of the last entry", []string{"NestMax", "Nest"}, nesting(func(p *driver.Pattern) {
		p.Loops[0].N = max(1, p.Loops[0].N-1)
	})},
	{"clamps a nest", []string{"NestBounds"}, sabotage{
		pattern: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			if err := p.Peer.Submit(tag, b); !errors.Is(err, driver.ErrBounds) {
				return err
			}
			return p.Peer.Submit(tag, empty())
		},
	}},
	{"reads a nest after Submit", []string{"NestNotKept"}, sabotage{
		pattern: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			p.b.later(time.Millisecond, func() { _ = p.Peer.Submit(tag, b) })
			return nil
		},
	}},
	{"allocates for a nest", []string{"NestNoAllocation"}, nesting(func(p *driver.Pattern) {
		p.Loops = append([]driver.Loop(nil), p.Loops...)
	})},
	{"numbers all connections alike", []string{"LastMessageEach"},
		receiving(func(m *driver.Message) {
			m.Conn = 1
		})},
	{"takes one connection for another at its end", []string{"LastMessageEach"},
		receiving(func(m *driver.Message) {
			if m.Err != nil {
				m.Conn++
			}
		})},
	{"uses numbers again", []string{"LastMessageEach", "LastMessagePolite"},
		receiving(func(m *driver.Message) {
			m.Conn = 1 + m.Conn%2
		})},
	{"has no number for its own connection", []string{"AnswerOrder", "CanConstant"}, sabotage{
		conn: func(*saboteurPeer) uint64 { return 0 },
	}},
	{"has one number for all of its own", []string{"AnswerEach"}, sabotage{
		conn: func(*saboteurPeer) uint64 { return 1 },
	}},
	{"says that its own connection ended", []string{"AnswerOrder"}, sabotage{
		receive: func(b *saboteur, msgs []driver.Message) (int, error) {
			n, err := b.Backend.Receive(msgs)
			if n > 0 && b.every(100) {
				msgs[0] = driver.Message{Conn: msgs[0].Conn, Err: driver.ErrPeerLost}
			}
			return n, err
		},
	}},
	{"loses answers", []string{"AnswerOrder"}, sabotage{
		answer: func(b *saboteur, conn uint64, msg []byte) error {
			if b.every(50) {
				return nil
			}
			return b.Backend.Answer(conn, msg)
		},
	}},
	{"answers twice", []string{"AnswerOrder", "AnswerEnded"}, sabotage{
		answer: func(b *saboteur, conn uint64, msg []byte) error {
			_ = b.Backend.Answer(conn, msg)
			return b.Backend.Answer(conn, msg)
		},
	}},
	{"reads an answer later", []string{"AnswerOrder"}, sabotage{
		answer: func(b *saboteur, conn uint64, msg []byte) error {
			b.later(time.Millisecond, func() { _ = b.Backend.Answer(conn, msg) })
			return nil
		},
	}},
	{"cuts long answers", []string{"AnswerSizes"}, sabotage{
		answer: func(b *saboteur, conn uint64, msg []byte) error {
			return b.Backend.Answer(conn, msg[:min(len(msg), b.Caps().MessageMax)])
		},
	}},
	{"takes answers without limit", []string{"AnswerBackPressure"}, sabotage{
		answer: func(*saboteur, uint64, []byte) error { return nil },
	}},
	{"never wakes for room for an answer", []string{"AnswerBackPressure"}, sabotage{
		arm: func(*saboteur) (bool, error) { return false, nil },
	}},
	{"takes answers to the dead", []string{"AnswerEnded", "AnswerUnknown"}, sabotage{
		answer: func(b *saboteur, conn uint64, msg []byte) error {
			if err := b.Backend.Answer(conn, msg); !errors.Is(err, driver.ErrPeerLost) {
				return err
			}
			return nil
		},
	}},
	{"does nothing for a context that is over", []string{"FenceOver"}, sabotage{
		revoke: func(m *saboteurMemory, ctx context.Context) error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return m.Memory.Revoke(ctx)
		},
	}},
	{"keeps the error of a revoke", []string{"FenceOver"}, sabotage{
		revoke: func(m *saboteurMemory, ctx context.Context) error {
			_ = m.Memory.Revoke(ctx)
			if ctx.Err() != nil {
				m.done.Store(true)
			}
			if m.done.Load() {
				return context.Canceled
			}
			return nil
		},
	}},
}

func without(can driver.Can) sabotage {
	return sabotage{can: func(p *saboteurPeer) driver.Can { return p.Peer.Can() &^ can }}
}

// nesting changes nests on their way.
func nesting(change func(*driver.Pattern)) sabotage {
	return sabotage{pattern: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
		if len(b.Pattern.Loops) == 0 {
			return p.Peer.Submit(tag, b)
		}
		c, nest := copied(b), *b.Pattern
		nest.Loops = append([]driver.Loop(nil), nest.Loops...)
		change(&nest)
		c.Pattern = &nest
		if p.Peer.Submit(tag, &c) == nil {
			return nil
		}
		return p.Peer.Submit(tag, b)
	}}
}

// receiving changes messages.
func receiving(change func(*driver.Message)) sabotage {
	return sabotage{receive: func(b *saboteur, msgs []driver.Message) (int, error) {
		n, err := b.Backend.Receive(msgs)
		for i := range n {
			change(&msgs[i])
		}
		return n, err
	}}
}

// TestBreaches proves that the checks named can fail.
func TestBreaches(t *testing.T) {
	if raceEnabled {
		t.Log("not run with the race detector, which notices first")
		return
	}
	for _, m := range breaches {
		t.Run(m.name, func(t *testing.T) {
			for _, name := range m.checks {
				notices(t, find(t, name), sabotaged(m.how), Pair)
			}
		})
	}
}
