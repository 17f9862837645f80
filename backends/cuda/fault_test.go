// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// TestRefusedInMidBatch has the driver refuse one call of a batch: it ends with that piece, once
// what was before is done, and the device goes on.
func TestRefusedInMidBatch(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	l, d := r.memory(drivertest.HostMemory, 1<<20), r.memory(hbm, 1<<20)
	var descs []driver.Desc
	for i := range uint64(10) {
		descs = append(descs, driver.Desc{Local: i * 8192, Remote: i * 8192, Len: 4096,
			LocalKey: l.m.key, RemoteKey: d.key})
	}
	want := r.content(d)
	for _, i := range []int{0, 1, 2, 3, 4, 5} {
		copy(want[i*8192:][:4096], r.content(l)[i*8192:])
	}
	libcuda.Set(t, "refuse_result", 2)
	libcuda.Put("refuse_after", 7)
	require.NoError(t, r.p.Submit(1, &driver.Batch{Op: driver.Write, Descs: descs}))
	err := r.end(1)
	var piece *driver.PieceError
	var said *gpu.Error
	if !errors.As(err, &piece) || piece.Piece != 6 || !errors.As(err, &said) || said.Result != 2 {
		t.Errorf("%v, want piece 6 and the driver's result 2", err)
	}
	r.same("what was before the failure", r.content(d), want)
	r.move(driver.Write, l, d, driver.Desc{Len: 1 << 20})
	r.same("after a failure", r.content(d), r.content(l))
	r.refusedLaunch(l, d)
}

// refusedLaunch has the driver refuse a kernel: its place must come free.
func (r *rig) refusedLaunch(l, d *place) {
	r.t.Helper()
	p := driver.Pattern{Count: 64, Run: 656, Local: driver.Side{Stride: 656},
		Remote: driver.Side{Stride: 656}, LocalKey: l.m.key, RemoteKey: d.key}
	for i := range uint64(2 * placesCount) {
		libcuda.Put("refuse_after", 2)
		require.NoError(r.t, r.p.Submit(100+i, &driver.Batch{Op: driver.Write, Pattern: &p}))
		var said *gpu.Error
		if err := r.end(100 + i); !errors.As(err, &said) || said.Call != "gather by kernel" {
			r.t.Errorf("a launch that was refused: %v", err)
		}
	}
	r.pages(driver.Write, &p, l, d)
}

// TestFault has the device fault under many batches: each ends once, with what the driver said, and
// so does what comes later; revokes and Close return.
func TestFault(t *testing.T) {
	if !alone(t, "") {
		return
	}
	b, err := New(testConfig())
	require.NoError(t, err)
	p, err := b.Connect(context.Background(), b.Addr())
	require.NoError(t, err)
	r := &rig{t: t, b: b, p: p.(*peer)}
	l := r.memory(drivertest.ForeignMemory, 1<<20)
	seg, owner, err := b.AllocDevice(0, 1<<20)
	require.NoError(t, err)
	m := r.register(seg)
	d := &place{m: m, key: r.imported(m)}
	r.move(driver.Write, l, d, driver.Desc{Len: 1 << 20})
	libcuda.Set(t, "delay_us", 500)
	libcuda.Put("fault_result", 700)
	libcuda.Put("fault_after", 30)
	outcomes, tags := map[uint64]error{}, 0
	for tag := uint64(1); tag <= 100; tag++ {
		if err := r.p.Submit(tag, &driver.Batch{Op: driver.Write,
			Descs: []driver.Desc{{Len: 64, LocalKey: l.m.key, RemoteKey: d.key}}}); err == nil {
			tags++
		}
	}
	for len(outcomes) < tags {
		var done [8]driver.Completion
		n, err := b.Poll(done[:])
		require.NoError(t, err)
		for _, c := range done[:n] {
			if _, twice := outcomes[c.Tag]; twice {
				t.Fatalf("tag %d ended twice", c.Tag)
			}
			outcomes[c.Tag] = c.Err
		}
	}
	bad := 0
	for tag, err := range outcomes {
		var said *gpu.Error
		switch {
		case err == nil:
		case errors.As(err, &said) && said.Result == 700:
			bad++
		default:
			t.Errorf("tag %d: %v", tag, err)
		}
	}
	if bad == 0 {
		t.Errorf("%d batches on a device that faulted, and none failed", tags)
	}
	if err := d.m.Revoke(context.Background()); err != nil {
		t.Errorf("revoke: %v", err)
	}
	if err := b.Close(); err != nil {
		t.Logf("close: %v", err) // unpinning fails as all does
	}
	_ = owner.Close()
	if n := libcuda.Get("streams") + libcuda.Get("events"); n != 0 {
		t.Errorf("%d streams and events are left", n)
	}
}

// TestTwoDevices moves between the memories of two devices, also where the peer has opened one
// only.
func TestTwoDevices(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	l := r.memory(drivertest.HostMemory, 1<<20)
	one := r.memory(hbm, 1<<20)
	two := r.memory(func(n uint64) (*drivertest.Space, error) { return hbmOn(1, n) }, 1<<20)
	for _, step := range []struct {
		op      driver.Op
		from, d *place
	}{{driver.Write, l, one}, {driver.Write, one, two}, {driver.Read, l, two},
		{driver.Read, one, two}} {
		r.fill(step.from)
		want := r.content(step.from)
		if step.op == driver.Read {
			want = r.content(step.d)
		}
		r.move(step.op, step.from, step.d, driver.Desc{Len: 1 << 20})
		r.same("the local side", r.content(step.from), want)
		r.same("the remote side", r.content(step.d), want)
	}
	p := driver.Pattern{Count: 100, Run: 656, Local: driver.Side{Stride: 656},
		Remote: driver.Side{Stride: 656, List: shuffled(100, 4)}, LocalKey: one.m.key,
		RemoteKey: two.key}
	r.pages(driver.Write, &p, one, two)
	r.mixed(l, one, two)
	cfg := testConfig()
	cfg.Devices = []int{1}
	other, err := New(cfg)
	require.NoError(t, err)
	defer other.Close()
	_, err = other.Register(one.space.Segment)
	sameError(t, "memory of a device that was left out", err, driver.ErrNotSupported)
}

// mixed has one batch name memory of both devices.
func (r *rig) mixed(l, one, two *place) {
	r.t.Helper()
	r.fill(l)
	var descs []driver.Desc
	for i := range uint64(8) {
		for _, d := range []*place{one, two} {
			descs = append(descs, driver.Desc{Local: i * 4096, Remote: i * 8192, Len: 4096,
				LocalKey: l.m.key, RemoteKey: d.key})
		}
	}
	want := r.content(one)
	for i := range 8 {
		copy(want[i*8192:][:4096], r.content(l)[i*4096:])
	}
	r.tag++
	require.NoError(r.t, r.p.Submit(r.tag, &driver.Batch{Op: driver.Write, Descs: descs}))
	require.NoError(r.t, r.end(r.tag))
	r.same("the first device", r.content(one), want)
	for i := range 8 {
		r.same("the second device", r.content(two)[i*8192:][:4096], want[i*8192:][:4096])
	}
}
