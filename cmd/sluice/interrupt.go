// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
)

// interruptible runs f, which takes no context, and returns without it when ctx ends: f opens what
// may be a pipe without another end, or has the kernel fault memory in. It leaves nothing behind
// that does not end with the process.
func interruptible[T any](ctx context.Context, f func() (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	ended := make(chan result, 1)
	go func() {
		v, err := f()
		ended <- result{v, err}
	}()
	select {
	case r := <-ended:
		return r.v, r.err
	case <-ctx.Done():
		var none T
		return none, context.Cause(ctx)
	}
}

// openInput opens a file for reading.
func openInput(ctx context.Context, name string) (*os.File, error) {
	return interruptible(ctx, func() (*os.File, error) { return os.Open(name) })
}
