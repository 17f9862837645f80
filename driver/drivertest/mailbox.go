// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// look calls Receive once, and audits what came.
func (h *host) look(msgs []driver.Message) (int, error) {
	h.receiving.Lock()
	defer h.receiving.Unlock()
	n, err := h.b.Receive(msgs)
	if n < 0 || n > len(msgs) {
		return 0, fmt.Errorf("Receive returned %d for %d places", n, len(msgs))
	}
	h.conns.audit(msgs[:n])
	return n, err
}

// receive takes messages until it has count of them. Past the limit it returns
// what it has, with errLate.
func (h *host) receive(count int, limit time.Duration) (got []message, err error) {
	var msgs [16]driver.Message
	for wait := newPatience(limit); len(got) < count; {
		n, err := h.look(msgs[:min(len(msgs), count-len(got))])
		if err != nil {
			return got, err
		}
		for _, m := range msgs[:n] {
			got = append(got, message{Conn: m.Conn, Data: m.Data, Err: relay(m.Err)})
		}
		if n == 0 {
			if _, err := h.ledger.poll(); err != nil {
				return got, err
			}
			if !wait.more() {
				return got, fmt.Errorf("%d of %d messages: %w", len(got), count, errLate)
			}
		}
	}
	return got, nil
}

// voucher is a message that says what the receiver must find.
type voucher struct {
	region   int
	off, len uint64
	sum      []byte
}

func (v voucher) encode() []byte {
	p := binary.LittleEndian.AppendUint64(nil, uint64(v.region))
	p = binary.LittleEndian.AppendUint64(p, v.off)
	p = binary.LittleEndian.AppendUint64(p, v.len)
	return append(p, v.sum...)
}

func decodeVoucher(p []byte) (voucher, error) {
	if len(p) < 24 {
		return voucher{}, fmt.Errorf("message of %d bytes is no voucher", len(p))
	}
	word := func(i int) uint64 { return binary.LittleEndian.Uint64(p[8*i:]) }
	return voucher{int(word(0)), word(1), word(2), p[24:]}, nil
}

// verify receives count vouchers and looks at the bytes at once, before any
// further call. Count in the reply is how many it has seen.
func (h *host) verify(count int, limit time.Duration) (r reply, err error) {
	for ; r.Count < count; r.Count++ {
		msgs, err := h.receive(1, limit)
		if err != nil {
			return r, err
		}
		if err := msgs[0].Err.orNil(); err != nil {
			return r, err
		}
		v, err := decodeVoucher(msgs[0].Data)
		if err != nil {
			return r, err
		}
		p, err := h.view(v.region, v.off, v.len)
		if err != nil {
			return r, err
		}
		if !bytes.Equal(digest(p), v.sum) {
			r.Faults = append(r.Faults, fmt.Sprintf(promise.Mark+
				"message %d came before its %d bytes at %d were visible", r.Count, v.len, v.off))
		}
	}
	return r, nil
}

// send submits a message alone and waits until it is on its way.
func (h *host) send(peer int, msg []byte) error {
	tag, err := h.submit(peer, driver.Write, nil, msg)
	if err != nil {
		return err
	}
	return h.ledger.await(tag, h.h.Limit)
}

// echo sends every message back until it is told to stop or the sender is lost: over a
// connection of its own, or with q.Answer by the one that it came by.
func (h *host) echo(q request, stop <-chan struct{}) (o outcome) {
	for ; !stopped(stop); o.count++ {
		last, err := h.echoOne(q)
		if err != nil {
			o.faults = []string{fmt.Sprintf("echo: %v", err)}
		}
		if last || err != nil {
			return o
		}
	}
	return o
}

// echoOne sends one message back, or waits for a moment if there is none.
func (h *host) echoOne(q request) (last bool, err error) {
	var msgs [1]driver.Message
	n, err := h.look(msgs[:])
	switch {
	case err != nil:
		return false, err
	case n == 1 && msgs[0].Err != nil:
		return true, nil
	case n == 1 && q.Answer:
		return false, h.answer(msgs[0].Conn, msgs[0].Data, h.h.Limit)
	case n == 1:
		return false, h.send(q.Peer, msgs[0].Data)
	case q.Parked:
		err = h.park(10 * time.Millisecond)
	default:
		_, err = h.ledger.poll()
	}
	if errors.Is(err, errLate) {
		err = nil
	}
	return false, err
}
