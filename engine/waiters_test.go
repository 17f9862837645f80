// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"testing"
	"time"
)

// parkedContext has the first goroutine that is about to sleep until it ends stand there: it has
// looked at the state of the transfer already.
type parkedContext struct {
	context.Context
	came, goOn chan struct{}
}

func (c *parkedContext) Done() <-chan struct{} {
	select {
	case c.came <- struct{}{}:
		<-c.goOn
	default:
	}
	return c.Context.Done()
}

func newParkedContext() *parkedContext {
	return &parkedContext{context.Background(), make(chan struct{}), make(chan struct{})}
}

// awake fails the test if a goroutine that was woken sleeps on.
func awake(t *testing.T, ended <-chan error) {
	t.Helper()
	select {
	case err := <-ended:
		check(t, err)
	case <-time.After(limit):
		t.Fatal("it still sleeps, though its post is over")
	}
}

// endPost ends the post that is under way.
func endPost(t *testing.T, f *fake, tr *Transfer) {
	t.Helper()
	for !f.finishOne(nil) {
	}
	check(t, tr.Wait(within(t)))
}

// TestAbortOutlastsItsPost: the post of an Abort that is about to sleep ends, and the program posts
// the transfer anew. Abort returns, for its own post is over, and does not await the next one.
func TestAbortOutlastsItsPost(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 1)
	ctx := newParkedContext()
	check(t, tr.Post())
	aborted := make(chan error, 1)
	go func() { aborted <- tr.Abort(ctx) }()
	<-ctx.came
	endPost(t, f, tr)
	check(t, tr.Post())
	close(ctx.goOn)
	awake(t, aborted) // the fake has the next post until the line below
	endPost(t, f, tr)
}

// TestCompletedTakesNoWaitersSignal: a goroutine that receives from Completed leaves the one in
// Wait its own signal.
func TestCompletedTakesNoWaitersSignal(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 1)
	ctx, completed := newParkedContext(), tr.Completed()
	check(t, tr.Post())
	waited := make(chan error, 1)
	go func() { waited <- tr.park(ctx, anyPost) }()
	<-ctx.came
	for !f.finishOne(nil) {
	}
	<-completed
	close(ctx.goOn)
	awake(t, waited)
}
