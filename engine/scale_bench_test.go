// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/engine"
)

// cpuTime is what this process has used so far.
func cpuTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkIdle reports the share of one core that an engine with eight peers
// takes while nothing happens.
func BenchmarkIdle(b *testing.B) {
	e, _ := openShm(b, "idle", 1<<16, nil)
	for i := range 8 {
		other, _ := openShm(b, fmt.Sprint("peer ", i), 1<<16, nil)
		join(b, e, other)
		join(b, other, e)
	}
	time.Sleep(100 * time.Millisecond) // what connecting left to do
	for b.Loop() {
		start, before := time.Now(), cpuTime(b)
		time.Sleep(2 * time.Second)
		b.ReportMetric(100*float64(cpuTime(b)-before)/float64(time.Since(start)), "%core")
	}
}

func join(b testing.TB, from, to *engine.Engine) *engine.Peer {
	d, err := to.Describe()
	if err != nil {
		b.Fatal(err)
	}
	p, err := from.Connect(context.Background(), d)
	if err != nil {
		b.Fatal(err)
	}
	return p
}

// BenchmarkRegister registers ranges of one allocation under names.
func BenchmarkRegister(b *testing.B) {
	const count = 16000
	e, whole := openShm(b, "whole", count*64, nil)
	seg := whole.Segment()
	names := make([]string, count)
	for i := range names {
		names[i] = fmt.Sprintf("kv.%05d", i)
	}
	for b.Loop() {
		start := time.Now()
		regions := make([]*engine.Region, count)
		for i := range regions {
			part, err := seg.Slice(uint64(i)*64, 64, [16]byte{})
			if err == nil {
				regions[i], err = e.Register(names[i], part)
			}
			if err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(time.Since(start).Nanoseconds())/count, "ns/region")
		for _, r := range regions {
			if err := r.Close(); err != nil {
				b.Fatal(err)
			}
		}
	}
}

// BenchmarkRegisterLarge registers 8 GiB that nobody has touched: bookkeeping
// only.
func BenchmarkRegisterLarge(b *testing.B) {
	m, err := engine.Alloc(8<<30, engine.AllocOptions{})
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	e, _ := openShm(b, "large", 1<<16, nil)
	var before, after runtime.MemStats
	for b.Loop() {
		runtime.ReadMemStats(&before)
		r, err := e.Register("8 GiB", m.Segment())
		runtime.ReadMemStats(&after)
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(after.TotalAlloc-before.TotalAlloc), "B-bookkeeping")
		if err := r.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkConnect describes 2,048 regions, connects, and makes a first transfer.
func BenchmarkConnect(b *testing.B) {
	const count = 2048
	owner, whole := openShm(b, "whole", count*4096, nil)
	for i := range count {
		part, err := whole.Segment().Slice(uint64(i)*4096, 4096, [16]byte{})
		if err == nil {
			_, err = owner.Register(fmt.Sprintf("kv.%04d", i), part)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	from, src := openShm(b, "from", 4096, nil)
	for b.Loop() {
		d, err := owner.Describe()
		if err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		p, err := from.Connect(context.Background(), d)
		if err != nil {
			b.Fatal(err)
		}
		connected := time.Now()
		if err := firstTransfer(from, p, src); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(len(d)), "B-description")
		b.ReportMetric(float64(connected.Sub(start).Microseconds()), "us-connect")
		b.ReportMetric(float64(time.Since(connected).Microseconds()), "us-first-transfer")
		if err := p.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

func firstTransfer(e *engine.Engine, p *engine.Peer, src *engine.Region) error {
	m, err := p.Remote("kv.1000")
	if err != nil {
		return err
	}
	t, err := e.NewTransfer(p, engine.Write, engine.Route{})
	if err != nil {
		return err
	}
	err = errors.Join(t.Add(src, 0, m, 0, 4096), t.Post(), t.Wait(context.Background()))
	return errors.Join(err, t.Close())
}

// BenchmarkNotify sends 8 bytes to and fro between two engines of one process,
// both sides spinning, or both parked on the channel.
func BenchmarkNotify(b *testing.B) {
	for _, spinning := range []bool{true, false} {
		name := map[bool]string{true: "spinning", false: "parked"}[spinning]
		b.Run(name, func(b *testing.B) {
			left, _ := openShm(b, "left", 1<<16, nil)
			right, _ := openShm(b, "right", 1<<16, nil)
			there, back := join(b, left, right), join(b, right, left)
			stop := make(chan struct{})
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				answer(right, back, spinning, stop)
			}()
			t := message(b, left, there)
			for b.Loop() {
				if err := t.Post(); err != nil {
					b.Fatal(err)
				}
				receive(left, spinning, nil)
				for !t.Done() {
				}
			}
			close(stop)
			<-ended
		})
	}
}

func message(b testing.TB, e *engine.Engine, p *engine.Peer) *engine.Transfer {
	t, err := e.NewTransfer(p, engine.Write, engine.Route{})
	if err == nil {
		err = t.Notify(binary.LittleEndian.AppendUint64(nil, 7))
	}
	if err != nil {
		b.Fatal(err)
	}
	return t
}

func answer(e *engine.Engine, p *engine.Peer, spinning bool, stop <-chan struct{}) {
	t, err := e.NewTransfer(p, engine.Write, engine.Route{})
	if err != nil || t.Notify(make([]byte, 8)) != nil {
		panic("no transfer to answer with")
	}
	for receive(e, spinning, stop) {
		if t.Post() != nil {
			return
		}
		for !t.Done() {
		}
	}
}

func receive(e *engine.Engine, spinning bool, stop <-chan struct{}) bool {
	var notes [1]engine.Notification
	for spinning {
		if e.Receive(notes[:]) == 1 {
			return true
		}
		select {
		case <-stop:
			return false
		default:
		}
	}
	select {
	case <-e.Notifications():
		return true
	case <-stop:
		return false
	}
}
