// SPDX-License-Identifier: Apache-2.0

package object

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// Bucket is what the tier needs of an object store. All methods may be called by any goroutine. An
// error is fs.ErrNotExist where there is no such object, and fs.ErrPermission where another try is
// of no use.
type Bucket interface {
	// Put writes an object, which is there as a whole or not at all.
	Put(ctx context.Context, name string, p []byte) error
	// Get reads the bytes of an object from an offset on into buffers, one after another. It writes
	// to none of them afterwards. Of an object that is not Info.Version any more, where that is not
	// "", it gives engine.ErrCorrupt.
	Get(ctx context.Context, name, version string, offset int64, into [][]byte) error
	// List calls visit with each object whose name begins with prefix, until that fails.
	List(ctx context.Context, prefix string, visit func(Info) error) error
	// Delete deletes an object, or finds that there is none.
	Delete(ctx context.Context, name string) error
	// AbortUploads ends uploads under a prefix that have begun before a time and not ended.
	AbortUploads(ctx context.Context, prefix string, before time.Time) error
}

// Info is what a store tells of an object.
type Info struct {
	Name    string
	Size    int64
	At      time.Time // when it was written, by the store's clock
	Version string    // other bytes of that name have another one; "": the store does not say
}

// requests are the requests to a bucket: their limits, their retries and the health that they show.
type requests struct {
	Bucket
	timeout time.Duration
	rest    time.Duration
	room    chan struct{} // one for each request that may run

	mu      sync.Mutex
	retries float64   // that may be made
	failed  int       // requests in a row
	without time.Time // until when the store is left alone
	last    error
	retried uint64
}

const (
	triesMax     = 3
	retriesMax   = 10  // in a row, of all requests
	retryEach    = 0.1 // what a request that worked adds to those
	retryAfter   = 50 * time.Millisecond
	failuresMax  = 3
	restOfAStore = 10 * time.Second
	requestsMax  = 16 // at a time
)

func newRequests(b Bucket, timeout, rest time.Duration) *requests {
	return &requests{Bucket: b, timeout: timeout, rest: rest, retries: retriesMax,
		room: make(chan struct{}, requestsMax)}
}

// do makes a request: again where it fails, as long as ctx, and the budget of retries, allow it.
// Each try has the timeout, and once more for each 8 MiB of its bytes.
func (r *requests) do(ctx context.Context, what string, bytes int,
	request func(context.Context) error) error {
	limit := r.timeout * time.Duration(1+bytes/spanMax)
	select {
	case r.room <- struct{}{}:
		defer func() { <-r.room }()
	case <-ctx.Done():
		return fmt.Errorf("%s: wait for other requests: %w", what, context.Cause(ctx))
	}
	for try := 1; ; try++ {
		began := time.Now()
		within, cancel := context.WithTimeoutCause(ctx, limit,
			fmt.Errorf("the store has not answered for %v", limit))
		err := request(within)
		if err != nil && within.Err() != nil {
			err = fmt.Errorf("%w (%w)", context.Cause(within), err)
		}
		cancel()
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			r.ended(nil)
			return wrap(what, err)
		}
		err = wrap(what, err)
		if ctx.Err() == nil || time.Since(began) > limit/2 { // else it had no time to answer
			r.ended(err)
		}
		if try == triesMax || errors.Is(err, fs.ErrPermission) ||
			errors.Is(err, engine.ErrCorrupt) || !r.mayRetry() {
			return err
		}
		after := time.Duration(float64(retryAfter<<try) * (0.5 + rand.Float64()))
		select {
		case <-time.After(after):
		case <-ctx.Done():
			return err
		}
	}
}

func wrap(what string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// mayRetry takes a retry of the budget, if there is one and the store is not left alone.
func (r *requests) mayRetry() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.retries < 1 || time.Now().Before(r.without) {
		return false
	}
	r.retries--
	r.retried++
	return true
}

// ended counts a request that worked, or an error of the store.
func (r *requests) ended(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		r.failed, r.retries = 0, min(r.retries+retryEach, retriesMax)
		return
	}
	r.last = err
	if r.failed++; r.failed >= failuresMax {
		r.without = time.Now().Add(r.rest)
	}
}

// unused says why the store is left alone now; nil: it is not.
func (r *requests) unused() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if rest := time.Until(r.without); rest > 0 {
		return fmt.Errorf("the store is tried again in %v, after: %w",
			rest.Round(time.Millisecond), r.last)
	}
	return nil
}

// Reader reads an object as a file, in requests with limits and retries of their own. One that has
// changed since it was listed gives engine.ErrCorrupt. Any goroutine may call ReadAt.
type Reader struct {
	ctx  context.Context
	r    *requests
	info Info
}

// Readers returns what makes a Reader of each object of a bucket. All of them share the budget of
// retries and the bound of requests at a time; timeout is that of one request. They end with ctx.
func Readers(ctx context.Context, b Bucket, timeout time.Duration) func(Info) *Reader {
	r := newRequests(b, timeout, restOfAStore)
	return func(o Info) *Reader { return &Reader{ctx, r, o} }
}

// ReadAt implements io.ReaderAt.
func (o *Reader) ReadAt(p []byte, off int64) (n int, err error) {
	end := error(nil)
	if left := max(0, o.info.Size-off); left < int64(len(p)) {
		p, end = p[:left], io.EOF
	}
	if len(p) == 0 {
		return 0, end
	}
	err = o.r.do(o.ctx, "read "+o.info.Name, len(p), func(ctx context.Context) error {
		return o.r.Get(ctx, o.info.Name, o.info.Version, off, [][]byte{p})
	})
	if err != nil {
		return 0, err
	}
	return len(p), end
}
