// SPDX-License-Identifier: Apache-2.0

// Fio has fio stand beside on lane file: requests of a size at random places, as many under way as
// a batch has pieces. It is a yardstick, no peer: it knows no lists of places and ends no batch
// before it begins another. See package peers.
package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/bench/peers"
	"github.com/sluicehq/sluice/driver"
)

func main() {
	if err := peers.Serve(&end{}); err != nil {
		fmt.Fprintln(os.Stderr, "drivers/fio:", err)
		os.Exit(1)
	}
}

// end runs fio over the file of the card.
type end struct {
	Path  string `json:"path"`
	Bytes uint64 `json:"bytes"`
}

// runTime is how long one run lasts, and blockSize what goes past the page cache.
const (
	runTime   = 300 * time.Millisecond
	blockSize = 4 << 10
)

// Open implements peers.End.
func (e *end) Open(r *peers.Request) (peers.Answer, error) {
	if r.Lane != string(peers.File) {
		return peers.Answer{}, fmt.Errorf("it is for lane %s: %w", peers.File, peers.ErrUnsupported)
	}
	return peers.Answer{Version: bench.FioName + " of the system",
		Settings: "io_uring, buffers and files registered, a queue that is always full"}, nil
}

// Memory implements peers.End.
func (e *end) Memory() []byte { return nil }

// Connect implements peers.End.
func (e *end) Connect(card string) error {
	b, err := base64.StdEncoding.DecodeString(card)
	if err == nil {
		err = json.Unmarshal(b, e)
	}
	if err != nil {
		return fmt.Errorf("read the card: %w", err)
	}
	return nil
}

// posting is a run.
type posting struct {
	fio   bench.Fio
	shape bench.Shape
}

// Prepare implements peers.End.
func (e *end) Prepare(op string, size uint64, local, _ []int32) (peers.Posting, error) {
	kind := driver.Write
	if op == "read" {
		kind = driver.Read
	}
	return &posting{bench.Fio{Path: e.Path, Cached: size%blockSize != 0, Time: runTime},
		bench.Shape{Op: kind, Size: size, Batch: len(local), Spread: e.Bytes}}, nil
}

// Measure implements peers.Measurer: what one run says of a batch.
func (p *posting) Measure(ctx context.Context) (time.Duration, error) {
	gbps, _, err := p.fio.Measure(ctx, &p.shape)
	if err != nil {
		return 0, err
	}
	return time.Duration(float64(p.shape.Size) * float64(p.shape.Batch) / gbps), nil
}

// Post implements peers.Posting.
func (p *posting) Post(ctx context.Context) error {
	_, err := p.Measure(ctx)
	return err
}

// Close implements peers.Posting.
func (p *posting) Close() error { return nil }

func (e *end) none() error { return fmt.Errorf("a file is no peer: %w", peers.ErrUnsupported) }

// Regions implements peers.End.
func (e *end) Regions(int, uint64) (peers.Answer, error) { return peers.Answer{}, e.none() }

// Notify implements peers.End.
func (e *end) Notify([]byte) error { return e.none() }

// Receive implements peers.End.
func (e *end) Receive() (bool, error) { return false, e.none() }
