// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// finish waits for one completion, helping as a waiter would.
func (l *lane) finish(b *testing.B) {
	var done [1]ring.Done
	for l.near.Poll(done[:]) == 0 {
		l.conn.Help(l.tag, nil)
	}
	if err := Error(done[0]); err != nil {
		b.Fatal(err)
	}
}

func Benchmark(b *testing.B) {
	for _, w := range ways {
		b.Run(w.name, func(b *testing.B) {
			l := openLane(b, w)
			for _, op := range []driver.Op{driver.Write, driver.Read} {
				for _, n := range []uint64{8, 656, 4 << 10, 64 << 10, 1 << 20, 4 << 20} {
					b.Run(fmt.Sprintf("%v/%d", op, n), func(b *testing.B) {
						d := []driver.Desc{{Len: n, LocalKey: testKey, RemoteKey: l.slot}}
						b.SetBytes(int64(n))
						b.ReportAllocs()
						for b.Loop() {
							l.tag++
							if err := submit(l.conn, op, l.tag, d, nil); err != nil {
								b.Fatal(err)
							}
							l.finish(b)
						}
					})
				}
				b.Run(fmt.Sprintf("%v/pages", op), func(b *testing.B) {
					r := rand.New(rand.NewPCG(1, 1))
					p := &driver.Pattern{Count: 2048, Run: 656, Local: driver.Side{Stride: 656},
						Remote:   driver.Side{Stride: 1312},
						LocalKey: testKey, RemoteKey: l.slot}
					for _, i := range r.Perm(2048) {
						p.Remote.List = append(p.Remote.List, uint32(i))
					}
					b.SetBytes(int64(p.Bytes()))
					b.ReportAllocs()
					for b.Loop() {
						l.tag++
						if err := submitPattern(l.conn, op, l.tag, p, nil); err != nil {
							b.Fatal(err)
						}
						l.finish(b)
					}
				})
			}
		})
	}
}
