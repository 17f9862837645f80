// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// describedCount is the regions of a model with as many blocks, each registered by itself.
const describedCount = 2048

// many is an engine over shm and tcp with that many regions of one allocation.
type many struct {
	*engine.Engine
	m *engine.Memory
}

func openMany(b testing.TB, name string, count int) many {
	b.Helper()
	s, err := shm.New(shm.Config{})
	need(b, err)
	w, err := tcp.New(tcp.Config{Plaintext: true, Listen: "127.0.0.1:0"})
	need(b, err)
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{s, w}})
	need(b, err)
	m, err := e.Alloc(uint64(count)*4096, engine.AllocOptions{})
	need(b, err)
	for i := range count {
		part, err := m.Segment().Slice(uint64(i)*4096, 4096, [16]byte{})
		need(b, err)
		_, err = e.Register(fmt.Sprintf("kv.%04d", i), part)
		need(b, err)
	}
	return many{e, m}
}

func (e many) close(b testing.TB) {
	need(b, e.Close())
	need(b, e.m.Close())
}

func need(b testing.TB, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// lapses are what the rounds of a benchmark took. The best tells most on a machine that others use.
type lapses []time.Duration

func (l *lapses) since(start time.Time) { *l = append(*l, time.Since(start)) }

func (l *lapses) report(b *testing.B, what string) {
	slices.Sort(*l)
	b.ReportMetric(float64((*l)[0].Nanoseconds())/1e3, "us-best"+what)
	b.ReportMetric(float64((*l)[len(*l)/2].Nanoseconds())/1e3, "us-median"+what)
	b.ReportMetric(0, "ns/op")
}

// BenchmarkDescribe describes 2,048 regions over shm and tcp: by an engine that has just
// registered them, and again.
func BenchmarkDescribe(b *testing.B) {
	var first, again lapses
	for b.Loop() {
		e := openMany(b, "many", describedCount)
		for _, took := range []*lapses{&first, &again, &again, &again} {
			start := time.Now()
			_, err := e.Describe()
			need(b, err)
			took.since(start)
		}
		e.close(b)
	}
	first.report(b, "-first")
	again.report(b, "-again")
}

// BenchmarkLearn takes such a description: to connect, and as a newer one of a peer.
func BenchmarkLearn(b *testing.B) {
	owner, from := openMany(b, "many", describedCount), openMany(b, "from", 1)
	defer owner.close(b)
	defer from.close(b)
	d, err := owner.Describe()
	need(b, err)
	var connects, refreshes lapses
	for b.Loop() {
		start := time.Now()
		p, err := from.Connect(context.Background(), d)
		need(b, err)
		connects.since(start)
		start = time.Now()
		need(b, p.Refresh(d))
		refreshes.since(start)
		need(b, p.Close())
	}
	connects.report(b, "-connect")
	refreshes.report(b, "-refresh")
}
