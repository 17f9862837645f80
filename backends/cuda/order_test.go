// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// producer is a stream of the program that fills memory, with an event.
type producer struct {
	*gpu.Device
	t     *testing.T
	event uintptr
}

func newProducer(t *testing.T) *producer {
	t.Helper()
	s, err := gpu.Open(0)
	require.NoError(t, err)
	p := &producer{Device: s, t: t}
	p.event, err = s.NewEvent()
	require.NoError(t, err)
	return p
}

func (p *producer) must(err error) {
	p.t.Helper()
	require.NoError(p.t, err)
}

func (p *producer) close() {
	p.t.Helper()
	p.must(p.Sync())
	p.must(p.Drop(p.event))
	p.must(p.Close())
}

// TestStartAfter posts transfers of layers before their bytes are there: each waits for the event
// of its layer, of the present step, and for no other.
func TestStartAfter(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	const layers, n = 3, 64 << 10
	libcuda.Set(t, "delay_us", 2000)
	source, kv, host := r.memory(hbm, layers*n), r.memory(hbm, layers*n),
		r.memory(drivertest.HostMemory, layers*n)
	scratch := r.memory(hbm, n)
	var streams [layers]*producer
	for i := range streams {
		streams[i] = newProducer(t)
		seg, err := kv.space.Segment.Slice(uint64(i)*n, n, [16]byte{})
		require.NoError(t, err)
		streams[i].must(r.b.StartAfter(seg, streams[i].event))
	}
	for range 4 {
		r.fill(source)
		want := r.content(source)
		var tags []uint64
		for i := range uint64(layers) {
			p := streams[i]
			for range 4 { // so that it takes a while
				p.must(p.Copy(scratch.m.base, source.m.base, n))
			}
			p.must(p.Copy(kv.m.base+i*n, source.m.base+i*n, n))
			p.must(p.Record(p.event))
			tags = append(tags, r.submit(driver.Read, host, kv, driver.Desc{Local: i * n,
				Remote: i * n, Len: n}))
		}
		r.endAll(tags)
		r.same("what the layers had when their events came", r.content(host), want)
	}
	for i, p := range streams {
		seg, _ := kv.space.Segment.Slice(uint64(i)*n, n, [16]byte{})
		p.must(r.b.StartAfter(seg, 0))
		p.close()
	}
	// the events are gone, and so are the gates
	r.move(driver.Read, host, kv, driver.Desc{Len: layers * n})
}

// endAll waits for tags in any order.
func (r *rig) endAll(tags []uint64) {
	r.t.Helper()
	done := map[uint64]bool{}
	for end := time.Now().Add(limit); len(done) < len(tags); time.Sleep(50 * time.Microsecond) {
		r.drain(done)
		if time.Now().After(end) {
			r.t.Fatalf("%d of %d batches ended", len(done), len(tags))
		}
	}
}

// TestGatesHoldNothingElseUp has a batch wait for an event that comes only after other batches: of
// those that share streams, and of gated ones.
func TestGatesHoldNothingElseUp(t *testing.T) {
	onStandIn(t)
	cfg := testConfig()
	cfg.Streams, cfg.Gated = 1, 2
	r := newRig(t, cfg)
	kv, host := r.memory(hbm, 3*4096), r.memory(drivertest.HostMemory, 4096)
	other := r.memory(hbm, 4096)
	middle, err := kv.space.Segment.Slice(4096, 4096, [16]byte{})
	require.NoError(t, err)
	blocked, late := newProducer(t), newProducer(t)
	// An event that is recorded on a stream which waits for a transfer that is submitted later.
	r.hold(late)
	blocked.must(blocked.Await(late.event))
	blocked.must(blocked.Record(blocked.event))
	blocked.must(r.b.StartAfter(middle, blocked.event))
	r.tag = 10
	first := r.submit(driver.Read, host, kv, driver.Desc{Remote: 4096, Len: 1024})
	second := r.submit(driver.Read, host, kv, driver.Desc{Local: 1024, Remote: 8191, Len: 1024})
	r.tag = 20
	if err := r.p.Submit(99, &driver.Batch{Op: driver.Read,
		Descs: []driver.Desc{{Len: 1, Local: 2048, Remote: 5000, LocalKey: host.m.key,
			RemoteKey: kv.key}}}); !errors.Is(err, driver.ErrFull) {
		t.Errorf("a third batch that waits: %v, want %v", err, driver.ErrFull)
	}
	for range 5 {
		r.move(driver.Write, host, other, driver.Desc{Len: 4096})
		r.move(driver.Read, host, kv, driver.Desc{Len: 4096})
		r.move(driver.Read, host, kv, driver.Desc{Remote: 8192, Len: 4096})
	}
	r.release()
	r.endAll([]uint64{first, second})
	blocked.must(r.b.StartAfter(middle, 0))
	blocked.close()
	late.close()
}

// hold puts so much on a stream that it takes until release; its event is behind it.
func (r *rig) hold(p *producer) {
	r.t.Helper()
	libcuda.Set(r.t, "hold", 1)
	m := r.local(hbm, 64)
	p.must(p.Copy(m.m.base, m.m.base+32, 13)) // the length that the stand-in holds
	p.must(p.Record(p.event))
}

func (r *rig) release() { libcuda.Put("hold", 0) }

// TestStreamWait has a stream read what a transfer brings, without waiting in between: short
// ones, and such as are longer than what goes on a stream at once.
func TestStreamWait(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	libcuda.Set(t, "delay_us", 1500)
	const most, held = 40 << 20, 13 // the length that the stand-in holds
	kv, copyOf, host := r.memory(hbm, most+32), r.memory(hbm, most),
		r.memory(drivertest.HostMemory, most+32)
	p := newProducer(t)
	for _, n := range []uint64{4096, 3 << 20, most} {
		r.fill(host)
		libcuda.Set(t, "hold", 1)
		r.tag++
		tag := r.tag
		p.must(r.p.Submit(tag, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{
			{Len: n, LocalKey: host.m.key, RemoteKey: kv.key},
			{Local: most + 8, Remote: most + 8, Len: held, LocalKey: host.m.key, RemoteKey: kv.key},
		}}))
		waited, err := r.b.StreamWait(p.Handle(), kv.space.Segment)
		if err != nil || waited != 1 {
			t.Fatalf("waits for %d batches, %v, want 1", waited, err)
		}
		p.must(p.Copy(copyOf.m.base, kv.m.base, n))
		r.release()
		p.must(p.Sync())
		r.same("what the stream read", r.content(copyOf)[:n], r.content(host)[:n])
		if err := r.end(tag); err != nil {
			t.Error(err)
		}
	}
	if n, err := r.b.StreamWait(p.Handle(), kv.space.Segment); n != 0 || err != nil {
		t.Errorf("idle memory: %d, %v", n, err)
	}
	p.close()
}

func TestOrderRefuses(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	libcuda.Set(t, "pin_result", 2)
	kv, host := r.memory(hbm, 1<<20), r.memory(drivertest.HostMemory, 1<<20)
	p := newProducer(t)
	sameError(t, "an event before host memory", r.b.StartAfter(host.space.Segment, p.event),
		driver.ErrNotSupported)
	_, err := r.b.StreamWait(p.Handle(), host.space.Segment)
	sameError(t, "a wait for host memory", err, driver.ErrNotSupported)
	p.must(r.b.StartAfter(kv.space.Segment, p.event))
	err = r.p.Submit(1, &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: 1, LocalKey: host.m.key, RemoteKey: kv.key}}})
	sameError(t, "memory that is not pinned, behind an event", err, driver.ErrNotSupported)
	p.must(r.b.StartAfter(kv.space.Segment, 0))
	libcuda.Set(t, "hold", 1)
	tag := r.submit(driver.Write, host, kv, driver.Desc{Len: 13}) // which the stand-in holds
	_, err = r.b.StreamWait(p.Handle(), kv.space.Segment)
	sameError(t, "a stream behind memory that is not pinned", err, driver.ErrNotSupported)
	r.release()
	if err := r.end(tag); err != nil {
		t.Error(err)
	}
	p.close()
	require.NoError(t, r.b.Close())
	sameError(t, "StartAfter of a closed backend", r.b.StartAfter(kv.space.Segment, 1),
		driver.ErrClosed)
	_, err = r.b.StreamWait(1, kv.space.Segment)
	sameError(t, "StreamWait of a closed backend", err, driver.ErrClosed)
}

// TestManyEvents bounds what one batch waits for.
func TestManyEvents(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	kv, host := r.memory(hbm, 1<<20), r.memory(drivertest.HostMemory, 1<<20)
	p := newProducer(t)
	var events []uintptr
	for i := range uint64(gpu.WaitsMax + 1) {
		e, err := p.NewEvent()
		p.must(err)
		events = append(events, e)
		seg, err := kv.space.Segment.Slice(i*64, 64, [16]byte{})
		p.must(err)
		p.must(r.b.StartAfter(seg, e))
	}
	r.move(driver.Write, host, kv, driver.Desc{Len: gpu.WaitsMax * 64})
	err := r.p.Submit(99, &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: 1 << 20, LocalKey: host.m.key, RemoteKey: kv.key}}})
	sameError(t, "too many events", err, driver.ErrBounds)
	for i, e := range events {
		seg, _ := kv.space.Segment.Slice(uint64(i)*64, 64, [16]byte{})
		p.must(r.b.StartAfter(seg, 0))
		p.must(p.Drop(e))
	}
	p.close()
}

// delays are how slow a device is, in microseconds a copy: a test goroutine that stalls for longer
// than a batch takes finds it over, and tries again with the next one.
var delays = []uint32{10_000, 100_000, 1_000_000}

// TestCancelDropsTheRest cancels, revokes and closes under batches of many chunks on slow
// devices: the rest is dropped.
func TestCancelDropsTheRest(t *testing.T) {
	onStandIn(t)
	const n = 200 << 20 // 25 chunks
	for name, c := range map[string]struct {
		end  func(r *rig, d *place) error
		want error
	}{
		"cancel": {func(r *rig, _ *place) error {
			r.p.Cancel(r.tag)
			return nil
		}, driver.ErrAborted},
		"revoke": {func(r *rig, d *place) error {
			return d.m.Revoke(context.Background())
		}, driver.ErrRevoked},
		"close": {func(r *rig, _ *place) error { return r.p.Close() }, driver.ErrClosed},
	} {
		for i, delay := range delays {
			over := false
			t.Run(fmt.Sprintf("%s/%d µs", name, delay), func(t *testing.T) {
				r := newRig(t, testConfig())
				l, d := r.memory(sparse, n), r.memory(hbmUntouched, n)
				libcuda.Set(t, "delay_us", delay)
				before := libcuda.Get("copies")
				tag := r.submit(driver.Write, l, d, driver.Desc{Len: n})
				require.NoError(t, c.end(r, d))
				libcuda.Put("delay_us", 0)
				err := r.end(tag)
				if over = err == nil && i < len(delays)-1; over {
					return // before it was ended
				}
				sameError(t, "a batch that was ended early", err, c.want)
				if copies := libcuda.Get("copies") - before; copies >= n/(8<<20) {
					t.Errorf("%d copies: nothing was dropped", copies)
				}
			})
			if !over {
				break
			}
		}
	}
}

// TestSmallOvertakesLarge has one stream for all: a short batch comes between the chunks of a long
// one.
func TestSmallOvertakesLarge(t *testing.T) {
	onStandIn(t)
	cfg := testConfig()
	cfg.Streams = 1
	r := newRig(t, cfg)
	const n = 160 << 20 // 20 chunks
	l, d := r.memory(sparse, n), r.memory(hbmUntouched, n)
	host, kv := r.memory(drivertest.HostMemory, 4096), r.memory(hbm, 4096)
	libcuda.Set(t, "delay_us", 0)
	for i, delay := range delays {
		libcuda.Put("delay_us", delay)
		ends := []uint64{r.submit(driver.Write, l, d, driver.Desc{Len: n})}
		for range 3 {
			ends = append(ends, r.submit(driver.Write, host, kv, driver.Desc{Len: 4096}))
			ends = r.until(ends, ends[len(ends)-1])
		}
		libcuda.Put("delay_us", 0)
		if len(ends) == 1 {
			r.endAll(ends)
			return
		}
		require.Less(t, i, len(delays)-1, "the long one ends before a short one")
	}
}

// until polls until the tag is done, and returns which of those under way are not.
func (r *rig) until(tags []uint64, tag uint64) []uint64 {
	r.t.Helper()
	done := map[uint64]bool{}
	for end := time.Now().Add(limit); !done[tag]; time.Sleep(50 * time.Microsecond) {
		r.drain(done)
		require.True(r.t, time.Now().Before(end), "tag %d does not end", tag)
	}
	return slices.DeleteFunc(slices.Clone(tags), func(t uint64) bool { return done[t] })
}
