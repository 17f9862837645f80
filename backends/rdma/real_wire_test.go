// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/machine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// wired is a pair over real verbs, with as many rails as wires of the guest between.
type wired struct {
	pair
	wires []machine.Wire
	l, r  *memory
	key   uint32
	round byte
	tags  []uint64
}

// openWired connects the near ends of wires with the far ones.
func openWired(t *testing.T, rails int, cfg Config) *wired {
	t.Helper()
	testkit.CheckLeaks(t)
	w := &wired{pair: pair{outcomes: map[uint64]error{}}}
	devices, err := machine.VerbsDevices(2 * rails)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	var near, far []string
	for i := range rails {
		wire, err := machine.NewWire(i)
		if err != nil {
			drivertest.SkipIfUnavailable(t, err)
		}
		w.wires = append(w.wires, wire)
		near, far = append(near, devices[2*i]), append(far, devices[2*i+1])
	}
	cfg.Devices = strings.Join(near, ",")
	w.near = openReal(t, cfg)
	cfg.Devices = strings.Join(far, ",")
	w.far = openReal(t, cfg)
	w.peer = w.connect(t)
	w.l, w.r = w.real(t, w.near), w.real(t, w.far)
	w.key = w.imports(t, w.r)
	t.Cleanup(func() { // before the backends close, which may wait for a wire
		for _, wire := range w.wires {
			if err := wire.Mend(); err != nil {
				t.Error(err)
			}
		}
	})
	eventually(t, "all queue pairs live", func() bool { return w.live() == rails })
	return w
}

func openReal(t *testing.T, cfg Config) *Backend {
	t.Helper()
	b, err := New(cfg)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close backend: %v", err)
		}
	})
	return b
}

const wiredBytes = 2 << 20

// lossMax is for a machine that is busy, and less than the default of Failure.
const lossMax = 9 * time.Second

func (w *wired) real(t *testing.T, b *Backend) *memory {
	t.Helper()
	buffer, err := hostmem.Alloc(wiredBytes, hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = buffer.Close() })
	seg := buffer.Segment()
	seg.Secret = [16]byte{7}
	m, err := b.Register(seg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = m.Revoke(context.Background()) })
	return m.(*memory)
}

// transfer writes all of one memory with a message, and looks at every byte.
func (w *wired) transfer(t *testing.T) time.Duration {
	t.Helper()
	begin := time.Now()
	w.start(t)
	w.finish(t)
	return time.Since(begin)
}

func (w *wired) start(t *testing.T) {
	t.Helper()
	w.round++
	for i := range w.l.bytes {
		w.l.bytes[i] = byte(i>>12) ^ byte(i) ^ w.round
	}
	w.tags = nil
	w.more(t)
}

// more submits it once more.
func (w *wired) more(t *testing.T) {
	t.Helper()
	w.tags = append(w.tags, w.write(t, w.l, w.key, []byte{w.round}))
}

func (w *wired) finish(t *testing.T) {
	t.Helper()
	for _, tag := range w.tags {
		if err := w.await(t, tag); err != nil {
			t.Fatalf("round %d: %v; %s", w.round, err, w.peer.Explain(w.l.key, w.key))
		}
	}
	var msgs []driver.Message
	eventually(t, "the messages", func() bool {
		msgs = append(msgs, received(t, w.far)...)
		return len(msgs) >= len(w.tags)
	})
	for _, m := range msgs {
		if len(m.Data) != 1 || m.Data[0] != w.round {
			t.Fatalf("round %d: message %v (%v)", w.round, m.Data, m.Err)
		}
	}
	if len(msgs) != len(w.tags) || !bytes.Equal(w.l.bytes, w.r.bytes) {
		t.Fatalf("round %d: %d messages, same bytes %v", w.round, len(msgs),
			bytes.Equal(w.l.bytes, w.r.bytes))
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	require.NoError(t, err)
}

// TestSoakRealWireBad bears delays and a wire that loses a part.
func TestSoakRealWireBad(t *testing.T) {
	w := openWired(t, 1, Config{})
	t.Logf("%v on a good wire", w.transfer(t))
	must(t, w.wires[0].Delay("20ms"))
	t.Logf("%v with 20 ms of delay", w.transfer(t))
	must(t, w.wires[0].Mend())
	must(t, w.wires[0].Loss("1%"))
	t.Logf("%v with 1 %% of loss", w.transfer(t))
	must(t, w.wires[0].Mend())
	t.Logf("%v when it was mended", w.transfer(t))
}

// TestRealWireDown takes the only wire down for less than Config.Failure, and in silence, in
// mid-transfer: the transfer ends well.
func TestRealWireDown(t *testing.T) {
	// A Failure for a machine that is busy: its queue pairs may need several tries to come to life.
	w := openWired(t, 1, Config{Timeout: 30 * time.Millisecond, Retries: 3,
		Failure: patience})
	for name, fault := range map[string]func() error{
		"down": w.wires[0].Down, "silent": func() error { return w.wires[0].Loss("100%") },
	} {
		for range 2 {
			w.start(t)
			must(t, fault())
			w.more(t)
			time.Sleep(time.Second)
			must(t, w.wires[0].Mend())
			begin := time.Now()
			w.finish(t)
			t.Logf("%s for a second: done %v after it was mended", name, time.Since(begin))
			eventually(t, "a live queue pair", func() bool { return w.live() == 1 })
		}
	}
	counted, err := w.near.net.Counters(0)
	require.NoError(t, err)
	if counted.Failures == 0 {
		t.Errorf("no queue pair has failed: %+v", counted)
	}
}

// TestSoakRealWireCut is for good: what is under way ends with the peer's loss, within the times
// that the Config says, and both sides are told.
func TestSoakRealWireCut(t *testing.T) {
	for name, fault := range map[string]func(machine.Wire) error{
		"silent": func(w machine.Wire) error { return w.Loss("100%") }, "down": machine.Wire.Down,
	} {
		t.Run(name, func(t *testing.T) { wireCut(t, fault) })
	}
}

func wireCut(t *testing.T, fault func(machine.Wire) error) {
	// The guest must not stand still for Failure before the wire is cut. The far end, which waits
	// for nothing, gives the near one up after ten of them.
	cfg := Config{Timeout: 30 * time.Millisecond, Retries: 3, Grace: time.Second,
		Failure: 3 * time.Second}
	w := openWired(t, 1, cfg)
	w.transfer(t)
	must(t, fault(w.wires[0]))
	w.start(t)
	begin := time.Now()
	if err := w.await(t, w.tag); !errors.Is(err, driver.ErrPeerLost) {
		t.Errorf("a write over a wire that was cut: %v", err)
	}
	_, most := cfg.FailureTime()
	if took := time.Since(begin); took > most+2*cfg.Failure+lossMax {
		t.Errorf("the peer was lost after %v, with a Failure of %v", took, cfg.Failure)
	} else {
		t.Logf("lost after %v: %s", took, w.peer.Explain(0, 0))
	}
	select {
	case <-w.peer.Lost():
	case <-time.After(patience):
		t.Fatal("the peer is not lost")
	}
	var msgs []driver.Message
	require.Eventually(t, func() bool {
		msgs = append(msgs, received(t, w.far)...)
		return len(msgs) > 0
	}, 10*cfg.Failure+patience, time.Millisecond, "the last word")
	if last := msgs[len(msgs)-1]; !errors.Is(last.Err, driver.ErrPeerLost) {
		t.Errorf("messages of a peer that was cut off: %+v", msgs)
	}
	require.NoError(t, w.near.Close()) // while the wire is cut
	require.NoError(t, w.far.Close())
}

// TestSoakRealRailDown takes one of two wires down in mid-transfer: the other one carries all, at
// the cost of the failure time at most, and the first comes back by itself.
func TestSoakRealRailDown(t *testing.T) {
	cfg := Config{Timeout: 30 * time.Millisecond, Retries: 3, Slice: 64 << 10,
		Listen: "127.0.0.1:0"}
	w := openWired(t, 2, cfg)
	t.Logf("%v with both wires", w.transfer(t))
	for i := range 2 {
		w.start(t)
		must(t, w.wires[i].Loss("100%"))
		w.more(t)
		begin := time.Now()
		w.finish(t)
		_, most := cfg.FailureTime()
		if took := time.Since(begin); took > 2*most+lossMax {
			t.Errorf("without wire %d: %v", i, took)
		} else {
			t.Logf("wire %d cut: done after %v", i, took)
		}
		t.Logf("%v over the other wire", w.transfer(t))
		must(t, w.wires[i].Mend())
		eventually(t, "the queue pair comes back", func() bool { return w.live() == 2 })
	}
	for i, r := range w.near.rails {
		counted, err := w.near.net.Counters(i)
		if err != nil || counted.BytesOut == 0 || counted.Failures == 0 || !r.usable() {
			t.Errorf("rail %v: %+v, %v", r, counted, err)
		}
	}
}
