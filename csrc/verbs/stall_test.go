// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"bytes"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
)

const (
	stallTime     = 150 * time.Millisecond
	wcRespTimeout = 20
)

// TestStalledPairFails has a device take requests and never say anything of them again: the
// queue pair fails all the same, and what it held is done by the next.
func TestStalledPairFails(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{config: Config{StallNanos: uint64(stallTime)}})
	near := d.fake.Device(0)
	near.Set(fakeverbs.Frozen, 1)
	fill(l.local, 3)
	begin := time.Now()
	tag := l.submit(t, driver.Write, numbered(0), driver.Desc{Len: 4096})
	if n := l.awaitNews(t, PairFailed); n.Status != wcRespTimeout {
		t.Errorf("the queue pair failed with %s", Status(n.Status))
	}
	if took := time.Since(begin); took < stallTime {
		t.Errorf("it failed after %v, before its time of %v", took, stallTime)
	}
	near.Set(fakeverbs.Frozen, 0)
	l.make(t, 0)
	if err := l.outcome(t, tag); err != nil {
		t.Error(err)
	}
	if n := l.notif(t); !bytes.Equal(n.Data, numbered(0)) ||
		!bytes.Equal(l.local[:4096], l.remote[:4096]) {
		t.Errorf("message %x, same bytes %v", n.Data, bytes.Equal(l.local[:4096], l.remote[:4096]))
	}
}

// TestSlowPairsDoNotStall: neither one that is slow but moves, nor one that has had nothing to do.
func TestSlowPairsDoNotStall(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{config: Config{StallNanos: uint64(5 * stallTime), SliceMax: 4096,
		Depth: 8}})
	near := d.fake.Device(0)
	near.Set(fakeverbs.DelayMicros, uint32((stallTime / 2).Microseconds()))
	for range 2 {
		if err := l.move(t, driver.Write, driver.Desc{Len: 16 * 4096}); err != nil {
			// 8 times the delay in all
			t.Error(err)
		}
		time.Sleep(6 * stallTime)
	}
	if c := l.counters(t); c.Failures != 0 {
		t.Errorf("%d failures", c.Failures)
	}
}
