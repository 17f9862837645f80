// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
)

// farWindow is staging memory of the peer that is ours to use.
type farWindow struct {
	slots   int
	carrier *lane
	remote  *Remote
}

// slotsMade brings the slots of a pool.
type slotsMade struct {
	sp   *stagedPeer
	pool *pool
}

func (m *slotsMade) happen() {
	for i := range m.pool.slots {
		m.sp.slots = append(m.sp.slots, newSlot(m.sp, m.pool, i))
	}
}

// windowMade brings the peer's staging memory.
type windowMade struct {
	sp *stagedPeer
	w  *farWindow
}

func (m *windowMade) happen() { m.sp.there[m.w.carrier] = m.w }

// heard is the answer to a request for a window.
type heard struct {
	by   *lane
	body []byte // not nil
}

// openWindow asks the peer's engine for staging memory, and waits for the answer. Asked
// again, the peer gives the same window.
func (sp *stagedPeer) openWindow(ctx context.Context, carrier *lane) (*farWindow, error) {
	select {
	case <-sp.heard: // the answer to an earlier request
	default:
	}
	w, err := (*farWindow)(nil), sp.p.tell(ctx, carrier, []byte{exchange.IsWindowAsk})
	if err == nil {
		w, err = sp.accept(ctx, carrier)
	}
	if err != nil {
		return nil, fmt.Errorf("ask the peer for staging memory: %w", err)
	}
	return w, nil
}

// accept takes the answer.
func (sp *stagedPeer) accept(ctx context.Context, carrier *lane) (*farWindow, error) {
	var body []byte
	for body == nil {
		select {
		case h := <-sp.heard:
			if h.by == carrier { // else it is late, and of a request by another
				body = h.body
			}
		case <-sp.p.conns[carrier.index].gone:
			return nil, ErrPeerLost
		case <-ctx.Done():
			return nil, fmt.Errorf("no answer: %w", driver.ContextError(ctx))
		}
	}
	const fixed = 2
	if len(body) < fixed {
		return nil, fmt.Errorf("an answer of %d bytes: %w", len(body), ErrCorrupt)
	}
	w := &farWindow{carrier: carrier, slots: int(binary.LittleEndian.Uint16(body))}
	if w.slots == 0 {
		if err := exchange.ParseOutcome(body[fixed:]); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("an answer without slots: %w", ErrCorrupt)
	}
	d, err := sp.p.read(body[fixed:])
	if err != nil {
		return nil, err
	}
	r, one := d.Only()
	if !one || r.Size < uint64(w.slots)*slotBytes || r.Kind != driver.DRAM {
		return nil, fmt.Errorf("a window of %d slots with another memory: %w", w.slots, ErrCorrupt)
	}
	w.remote = sp.p.remoteOf(&d.Description, &r)
	_, err = w.remote.key(carrier.index)
	return w, err
}

// answered takes an answer of the peer that came by a connection of ours.
func (sp *stagedPeer) answered(by *conn, what byte, body []byte) {
	if what == exchange.IsHopEnd {
		sp.loop.pushForeign(&hopEnded{sp, by.lane, body})
		return
	}
	select {
	case sp.heard <- heard{by.lane, body}:
	default: // a second one
	}
}

// hopEnded is the answer to a request for a hop, or to its withdrawal.
type hopEnded struct {
	sp   *stagedPeer
	by   *lane
	body []byte
}

func (e *hopEnded) happen() {
	var h exchange.Hop
	rest, ok := h.ParseName(e.body)
	if !ok || int(h.Slot) >= len(e.sp.slots) {
		return
	}
	s := e.sp.slots[h.Slot]
	if s.job == nil || s.number != h.Number || s.answered || s.step == atNear || s.c.by != e.by {
		return
	}
	s.answered, s.answer = true, exchange.ParseOutcome(rest)
	if s.step == atHand {
		s.proceed()
	}
}
