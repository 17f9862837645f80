// SPDX-License-Identifier: Apache-2.0

package letters

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

// wired is a line between two boxes, and how often each has been woken.
type wired struct {
	Line
	nearWoken, farWoken atomic.Int64
}

func newWired(most int) *wired {
	w := &wired{Line: Line{From: &Box{}, To: &Box{}}}
	w.From.Open("near", most, func() { w.nearWoken.Add(1) })
	w.To.Open("far", most, func() { w.farWoken.Add(1) })
	return w
}

// send promises letters of that text.
func (w *wired) send(t *testing.T, texts ...string) (list []*Letter) {
	t.Helper()
	for _, text := range texts {
		x := Message([]byte(text))
		if err := w.Promise(x); err != nil {
			t.Fatal(err)
		}
		list = append(list, x)
	}
	return list
}

func (w *wired) received() (texts []string) {
	var msgs [8]driver.Message
	for _, m := range msgs[:w.To.Receive(msgs[:])] {
		texts = append(texts, fmt.Sprintf("%s %s", m.From, m.Data))
	}
	return texts
}

// TestOrder: what ends early waits for what was submitted before it; what failed is passed over.
func TestOrder(t *testing.T) {
	w := newWired(8)
	list := w.send(t, "a", "b", "c", "d")
	w.Post(list[3], nil)
	w.Post(list[1], nil)
	if got := w.received(); got != nil || w.To.Ready() || w.farWoken.Load() != 0 {
		t.Errorf("received %q before the first", got)
	}
	w.Post(list[0], nil)
	if got, want := w.received(), []string{"near a", "near b"}; !slices.Equal(got, want) {
		t.Errorf("received %q, want %q", got, want)
	}
	w.Post(list[2], errors.New("failed"))
	if got, want := w.received(), []string{"near d"}; !slices.Equal(got, want) || w.farWoken.Load() != 3 {
		t.Errorf("received %q, want %q; woken %d times", got, want, w.farWoken.Load())
	}
	w.Post(nil, nil)
	if err := w.Promise(nil); err != nil || w.To.promised.Load() != 0 {
		t.Errorf("no letter: %v, and %d places are taken", err, w.To.promised.Load())
	}
}

// TestFull: a place is taken until Receive, and who found none is alarmed, once.
func TestFull(t *testing.T) {
	w := newWired(2)
	list := w.send(t, "a", "b")
	for range 3 {
		if err := w.Promise(Message([]byte("c"))); err != driver.ErrFull {
			t.Fatalf("a third of two: %v", err)
		}
	}
	w.Post(list[0], nil)
	w.Post(list[1], nil)
	if w.From.Ready() || w.nearWoken.Load() != 0 {
		t.Error("alarmed before a place came free")
	}
	if got := w.received(); len(got) != 2 {
		t.Fatalf("received %q", got)
	}
	if !w.From.Ready() || w.From.Ready() || w.nearWoken.Load() != 1 {
		t.Errorf("woken %d times, want one alarm", w.nearWoken.Load())
	}
	w.send(t, "c")
	w.received()
	if w.nearWoken.Load() != 1 {
		t.Error("alarmed though nothing was refused")
	}
}

// TestLastWord needs no place and gives none back.
func TestLastWord(t *testing.T) {
	w := newWired(1)
	list := w.send(t, "a")
	w.To.Deliver(driver.Message{From: "near", Err: driver.ErrPeerLost})
	if !w.To.Ready() {
		t.Error("nothing to receive")
	}
	w.received()
	if err := w.Promise(Message(nil)); err != nil {
		t.Error(err)
	}
	if err := w.Promise(Message([]byte("b"))); err != driver.ErrFull {
		t.Errorf("a second of one: %v", err)
	}
	w.Post(list[0], nil)
}

func TestCounts(t *testing.T) {
	w := newWired(1)
	if w.To.AwaitCount(5, 2) {
		t.Error("two of none")
	}
	for n := uint64(1); n <= 3; n++ {
		x := Count(5)
		if err := w.Promise(x); err != nil {
			t.Fatal(err) // a count gives its place back
		}
		w.Post(x, nil)
		if got := w.To.Count(5); got != n || w.To.Ready() != (n >= 2) {
			t.Errorf("counted %d of %d", got, n)
		}
	}
	if !w.To.AwaitCount(5, 3) || w.To.Count(4) != 0 {
		t.Error("three have come, all to one counter")
	}
}

// TestManySenders: nobody who was refused is forgotten.
func TestManySenders(t *testing.T) {
	const senders, each = 8, 200
	to := &Box{}
	ready := make(chan struct{}, 1)
	poke := func(c chan struct{}) func() {
		return func() {
			select {
			case c <- struct{}{}:
			default:
			}
		}
	}
	to.Open("far", 2, poke(ready))
	var all sync.WaitGroup
	for i := range senders {
		from, room := &Box{}, make(chan struct{}, 1)
		from.Open(fmt.Sprint(i), 2, poke(room))
		all.Go(func() {
			l := &Line{From: from, To: to}
			for range each {
				x := Message([]byte{1})
				for l.Promise(x) != nil {
					<-room
				}
				l.Post(x, nil)
			}
		})
	}
	var msgs [3]driver.Message
	for got := 0; got < senders*each; {
		n := to.Receive(msgs[:])
		if got += n; n == 0 {
			<-ready
		}
	}
	all.Wait()
}

func TestLen(t *testing.T) {
	var none *Letter
	if none.Len() != 0 || Message([]byte("abc")).Len() != 3 || Message([]byte{}) == nil || Count(1).Len() != 0 {
		t.Error("a letter is not as long as its message")
	}
}
