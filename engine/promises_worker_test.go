// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// promiser is one worker.
type promiser struct {
	*promises
	slot  uint64
	rng   *rand.Rand
	peer  *engine.Peer
	count uint64
}

func (w *promiser) work() {
	for n := 0; w.goesOn(n); {
		if !w.dial() {
			continue
		}
		n++
		w.note(&w.actions)
		switch w.rng.IntN(8) {
		case 0, 1, 2:
			w.move(engine.Write)
		case 3, 4:
			w.move(engine.Read)
		case 5, 6:
			w.lease()
		case 7:
			if w.rng.IntN(10) == 0 {
				w.hangUp()
			}
		}
	}
	if w.peer != nil {
		w.hangUp()
	}
}

// goesOn reports whether the run has not ended after n actions of this worker.
func (w *promiser) goesOn(n int) bool {
	if w.long.actions > 0 {
		return n < w.long.actions
	}
	return time.Now().Before(w.end)
}

// dial makes a connection if there is none that lives.
func (w *promiser) dial() bool {
	if w.peer != nil {
		select {
		case <-w.peer.Lost():
			w.hangUp()
		default:
			return true
		}
	}
	d, err := w.b.Describe()
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		w.peer, err = w.a.Connect(ctx, d)
	}
	if err != nil {
		w.peer = nil
		time.Sleep(500 * time.Microsecond) // it flaps
		return false
	}
	w.note(&w.connections)
	return true
}

func (w *promiser) hangUp() {
	if err := w.peer.Close(); err != nil {
		w.breaks("close a peer: %v", err)
	}
	w.peer = nil
}

// here and there are the worker's bytes on both sides.
func (w *promiser) here() []byte  { return w.src.Bytes()[w.slot*slotBytes:][:slotBytes] }
func (w *promiser) there() []byte { return w.dst.Bytes()[w.slot*slotBytes:][:slotBytes] }

// paint fills bytes with what never was there before.
func (w *promiser) paint(b []byte) {
	w.count++
	x := (w.slot+1)<<56 | w.count<<24
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], x+uint64(i))
	}
}

// move writes to the peer or reads from it, with luck to the end.
func (w *promiser) move(op engine.Op) {
	m, err := w.peer.Remote("dst")
	if err != nil {
		w.breaks("find the peer's region: %v", err)
		return
	}
	w.transfer(op, m, w.slot*slotBytes, func(*engine.Transfer) {})
}

// lease has the owner lease its slot, and revoke it at any moment.
func (w *promiser) lease() {
	l, err := w.dst.Lease(w.slot*slotBytes, slotBytes, engine.LeaseOptions{})
	if err != nil {
		w.breaks("lease: %v", err)
		return
	}
	revoke := func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := l.Revoke(ctx); err != nil {
			w.breaks("revoke: %v", err)
		}
	}
	defer revoke()
	m, err := w.peer.Import(l.Token())
	if err != nil {
		return // a connection that is lost
	}
	defer m.Close()
	w.transfer(engine.Write, m, 0, func(*engine.Transfer) {
		if w.rng.IntN(2) == 0 {
			return
		}
		time.Sleep(time.Duration(w.rng.IntN(300)) * time.Microsecond)
		revoke()
		w.note(&w.revoked)
		w.silent(w.there(), "after Revoke")
	})
}

// transfer runs one transfer of the slot, and something beside it.
func (w *promiser) transfer(op engine.Op, m *engine.Remote, at uint64,
	beside func(*engine.Transfer)) {
	t, err := w.a.NewTransfer(w.peer, op, engine.Route{})
	if err != nil {
		w.breaks("make a transfer: %v", err)
		return
	}
	defer func() {
		if err := t.Close(); err != nil {
			w.breaks("close a transfer: %v", err)
		}
	}()
	w.paint(w.here())
	w.paint(w.there())
	n := uint64(1 + w.rng.IntN(slotBytes))
	n -= n % 8
	if n == 0 {
		n = 8
	}
	off := uint64(w.rng.IntN(int(slotBytes-n+1))) &^ 7
	if err := t.Add(w.src, w.slot*slotBytes+off, m, at+off, n); err != nil {
		return // lost, or revoked
	}
	number := (w.slot+1)<<56 | w.count
	if op == engine.Write && w.rng.IntN(3) == 0 {
		if err := t.Notify(binary.LittleEndian.AppendUint64(nil, number)); err != nil {
			w.breaks("attach a message: %v", err)
		}
	} else {
		number = 0
	}
	from, to := w.there(), w.here()
	if op == engine.Write {
		from, to = to, from
	}
	want := slices.Clone(to)
	copy(want[off:off+n], from[off:off+n])
	if err := t.Post(); err != nil {
		w.failedWith(err)
		return
	}
	beside(t)
	w.outcome(t, number, want, to)
}

// outcome waits for the end of a transfer, or makes it end.
func (w *promiser) outcome(t *engine.Transfer, number uint64, want, to []byte) {
	abort := w.rng.IntN(4) == 0
	if abort {
		time.Sleep(time.Duration(w.rng.IntN(400)) * time.Microsecond)
	} else {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		_ = t.Wait(ctx)
		cancel()
		abort = ctx.Err() == context.DeadlineExceeded
	}
	revoked := w.wasRevoked(to)
	if err := t.Abort(context.Background()); err != nil {
		w.breaks("no proof: %v", err)
		return
	}
	err := t.Err()
	if !t.Done() || t.Err() != err {
		w.breaks("a transfer has no one outcome: done %v, %v, %v", t.Done(), err, t.Err())
	}
	switch {
	case err == nil:
		w.note(&w.succeeded)
		if !revoked && !bytes.Equal(to, want) {
			w.breaks("a transfer succeeded, and %d bytes are wrong", differences(to, want))
		}
		if number != 0 {
			w.mu.Lock()
			w.sent[number] = true
			w.mu.Unlock()
		}
	case errors.Is(err, engine.ErrAborted):
		w.note(&w.aborted)
	default:
		w.failedWith(err)
	}
	w.silent(to, "after the end of a transfer with "+fmt.Sprint(err))
}

// wasRevoked reports whether the target was painted anew when its lease had ended.
func (w *promiser) wasRevoked(to []byte) bool {
	v, ok := w.leased.LoadAndDelete(w.slot)
	return ok && bytes.Equal(v.([]byte), to)
}

// silent paints bytes anew, and looks whether anybody writes there.
func (w *promiser) silent(b []byte, when string) {
	w.paint(b)
	want := slices.Clone(b)
	if strings.HasPrefix(when, "after Revoke") {
		w.leased.Store(w.slot, want)
	}
	time.Sleep(time.Duration(w.rng.IntN(4)) * time.Millisecond)
	if !bytes.Equal(b, want) {
		w.breaks("%d bytes landed %s", differences(b, want), when)
	}
}

// failedWith notes a failure, which must be one that faults explain.
func (w *promiser) failedWith(err error) {
	w.note(&w.failed)
	for _, known := range []error{engine.ErrPeerLost, engine.ErrRevoked, engine.ErrTimeout,
		engine.ErrClosed} {
		if errors.Is(err, known) {
			return
		}
	}
	w.breaks("a transfer failed with %v", err)
}

func differences(a, b []byte) (n int) {
	for i := range a {
		if a[i] != b[i] {
			n++
		}
	}
	return n
}
