// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"

	"github.com/sluicehq/sluice/driver"
)

// TestMessageByAnotherLane reads by one backend and tells the peer by another,
// which is not posted to before the first has finished. Nobody spins: the engine
// itself has to look for the completion.
func TestMessageByAnotherLane(t *testing.T) {
	data, talk := &fake{name: "data", manual: true, mute: true}, &fake{name: "talk"}
	var ops []driver.Op
	talk.onSubmit = func(_ int, op driver.Op, _ uint64, notify bool) error {
		ops = append(ops, op)
		return nil
	}
	e := open(t, "e", func(c *Config) {
		c.Backends = []driver.Backend{data, talk}
		c.Spin = -1
	})
	r := register(t, e, "r", 1<<16)
	p, err := e.Self()
	check(t, err)
	tr, err := e.NewTransfer(p, Read, Route{})
	check(t, err)
	scattered(t, tr, r, remote(t, p, "r"), 100)
	check(t, tr.Notify([]byte("done")))
	for round := range 5 {
		check(t, tr.Post())
		for range 100 {
			for !data.finishOne(nil) {
				e.lanes[0].poll()
			}
		}
		e.lanes[0].poll()
		check(t, tr.Wait(within(t)))
		if len(ops) != round+1 || ops[round] != Write {
			t.Fatalf("messages went as %v, want as writes", ops)
		}
	}
	check(t, tr.Close())
}
