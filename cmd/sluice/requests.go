// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/pflag"

	"github.com/sluicehq/sluice/kv/trace"
)

// The bounds of a replay: all of its requests are held in memory, by each process.
const (
	requestsMax = 1 << 20
	blocksMax   = 4 << 20 // in all requests; two billion tokens
)

// traceLine is a line of a trace.
const traceLine = `{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1]}`

// openInput opens a file to be read until ctx ends. Then it is closed, so that nobody waits longer
// for the writer of a pipe, or for what that writes.
func openInput(ctx context.Context, name string) (*os.File, error) {
	type outcome struct {
		file *os.File
		err  error
	}
	opened := make(chan outcome, 1)
	go func() {
		file, err := os.Open(name)
		opened <- outcome{file, err}
	}()
	select {
	case o := <-opened:
		if o.err == nil {
			context.AfterFunc(ctx, func() { _ = o.file.Close() })
		}
		return o.file, o.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// chooseTrace takes the trace that a command names, or some requests that are made up.
func (f *replayFlags) chooseTrace(s *pflag.FlagSet, args []string) {
	switch f.exactly = s.Changed("requests"); {
	case len(args) > 0:
		f.trace = args[0]
	case !f.exactly:
		f.requests = 1000
	}
}

// load reads or makes the requests.
func (f *replayFlags) load(ctx context.Context) ([]trace.Request, error) {
	if f.trace == "" {
		g := trace.NewGenerator(f.seed)
		return collect(f.requests, func() (trace.Request, error) { return g.Next(), nil })
	}
	file, err := openInput(ctx, f.trace)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	defer file.Close()
	list, err := collect(f.requests, trace.NewReader(file).Next)
	var wrong *trace.LineError
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case errors.As(err, &wrong):
		return nil, fmt.Errorf("%s: %w; a line is such as %s", f.trace, err, traceLine)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", f.trace, err)
	case len(list) == 0 && !(f.exactly && f.requests > 0):
		return nil, fmt.Errorf("%s has no requests: a line is such as %s", f.trace, traceLine)
	}
	if f.exactly && len(list) < f.requests {
		return nil, fmt.Errorf("%s has %d requests, --requests asks for %d", f.trace, len(list),
			f.requests)
	}
	return list, nil
}

// collect takes requests from next until there are n, or no more; n 0: all.
func collect(n int, next func() (trace.Request, error)) ([]trace.Request, error) {
	var list []trace.Request
	blocks := 0
	for n == 0 || len(list) < n {
		q, err := next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		list = append(list, q)
		if blocks += len(q.HashIDs); blocks > blocksMax || len(list) > requestsMax {
			return nil, fmt.Errorf("%d requests have %d blocks, a replay takes at most %d "+
				"requests of %d blocks in all: use fewer --requests",
				len(list), blocks, requestsMax, blocksMax)
		}
	}
	return list, nil
}
