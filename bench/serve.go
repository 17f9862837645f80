// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// End is one end of a participant whose driver is written in Go.
type End interface {
	// Open opens this end; the answer holds Version, Settings and Card.
	Open(r *Request) (Answer, error)
	// Memory is the memory that Open registered. Slot 0 is at its start.
	Memory() []byte
	// Connect makes the other end reachable by its card.
	Connect(card string) error
	// Prepare makes an operation that can be posted repeatedly.
	Prepare(op string, size uint64, local, remote []int32) (Posting, error)
	// Notify sends a message; Receive says whether one has arrived.
	Notify(message []byte) error
	Receive() (bool, error)
}

// Posting is a prepared operation.
type Posting interface {
	// Post posts the operation and returns when it is complete.
	Post(ctx context.Context) error
	Close() error
}

// Measurer is a Posting of a program that measures itself: DoGo runs it once.
type Measurer interface {
	Measure(ctx context.Context) (perOperation time.Duration, err error)
}

// Keeper is an End whose bytes are in a file instead of its Memory.
type Keeper interface {
	io.ReaderAt
	io.WriterAt
	// Cache reads the whole file into the page cache, or writes it back and drops it from there.
	Cache(all bool) error
}

// Alone is an End that holds both memories, so that there is no target. Request.FarBytes tells Open
// the size of the second one, Far returns it, and the slots of Request.Remote lie in it.
type Alone interface {
	Far() []byte
}

// Keyed is an End whose pieces have keys, by which OpMatch looks for them.
type Keyed interface{ Keyed() }

// Resetter is a Posting that needs something done before each Post, of which the time does not
// count.
type Resetter interface {
	Reset(ctx context.Context) error
}

// Remarker is an End that has something to say of what was posted since it was asked last.
type Remarker interface{ Remark() string }

// Sizer is a Posting that moves another number of bytes than the request says.
type Sizer interface{ Bytes() uint64 }

// Serve answers requests on the driver's descriptors until the harness closes its end.
func Serve(e End) error {
	s := &server{end: e}
	return s.run(os.NewFile(requestsFD, "requests"), os.NewFile(answersFD, "answers"))
}

type server struct {
	end      End
	postings []Posting
	next     int // round of operations that the next loop begins with
}

func (s *server) run(in io.Reader, out io.Writer) error {
	lines, answers := json.NewDecoder(bufio.NewReaderSize(in, 1<<20)), json.NewEncoder(out)
	for {
		var r Request
		if err := lines.Decode(&r); errors.Is(err, io.EOF) {
			return s.drop()
		} else if err != nil {
			return fmt.Errorf("read a request: %w", err)
		}
		a, err := s.answer(&r)
		switch {
		case errors.Is(err, ErrUnsupported):
			class := ": " + ErrUnsupported.Error() // the harness adds it again
			a = Answer{Unsupported: strings.TrimSuffix(err.Error(), class)}
		case err != nil:
			a = Answer{Error: err.Error()}
		}
		a.ID = r.ID
		if err := answers.Encode(&a); err != nil {
			return fmt.Errorf("answer: %w", err)
		}
	}
}

func (s *server) answer(r *Request) (Answer, error) {
	if _, ok := s.end.(Alone); r.Far && !ok {
		return Answer{}, fmt.Errorf("it has one memory: %w", ErrUnsupported)
	}
	switch r.Do {
	case DoOpen:
		return s.open(r)
	case DoConnect:
		return timed(func() error { return s.end.Connect(r.Card) })
	case DoServe: // drivers in Go make progress without calls
		return Answer{}, nil
	case DoPrepare:
		return s.prepare(r)
	case DoOnce:
		return timed(func() error { return s.postings[0].Post(context.Background()) })
	case DoGo:
		return s.loop(r)
	case DoDrop:
		return Answer{}, s.drop()
	case DoStamp:
		return Answer{}, s.stamp(r)
	case DoDigest:
		return s.digest(r)
	case DoCache:
		return Answer{}, s.cache(r.On)
	case DoPing:
		return s.ping(r)
	case DoPong:
		return Answer{}, s.pong(r)
	}
	return Answer{}, fmt.Errorf("%s: %w", r.Do, ErrUnsupported)
}

func timed(f func() error) (Answer, error) {
	begin := time.Now()
	err := f()
	return Answer{NS: int64(time.Since(begin))}, err
}

// open opens the end and fills its memory with bytes that differ from the other end's, so that
// check notices a transfer that moves nothing.
func (s *server) open(r *Request) (Answer, error) {
	a, err := s.end.Open(r)
	if err != nil {
		return a, err
	}
	fill(s.end.Memory(), uint64(len(r.Role)))
	if e, ok := s.end.(Alone); ok {
		fill(e.Far(), 1)
	}
	return a, nil
}

func fill(b []byte, x uint64) {
	for ; len(b) >= 8; b = b[8:] {
		x = x*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(b, x)
	}
}

func (s *server) prepare(r *Request) (a Answer, err error) {
	if err := s.drop(); err != nil {
		return a, err
	}
	if _, ok := s.end.(Keyed); r.Op == OpMatch && !ok {
		return a, fmt.Errorf("it has no keys to look for: %w", ErrUnsupported)
	}
	for i := range r.Local {
		p, err := s.end.Prepare(r.Op, r.Size, r.Local[i], r.Remote[i])
		if err != nil {
			return a, errors.Join(err, s.drop())
		}
		s.postings = append(s.postings, p)
	}
	if p, ok := s.postings[0].(Sizer); ok {
		a.Bytes = p.Bytes()
	}
	return a, nil
}

func (s *server) drop() error {
	var errs []error
	for _, p := range s.postings {
		errs = append(errs, p.Close())
	}
	s.postings, s.next = nil, 0
	return errors.Join(errs...)
}

// loop posts the operations in turn until the time is over, from where the loop before ended. Each
// thread has its own share of them.
func (s *server) loop(r *Request) (Answer, error) {
	threads := max(r.Threads, 1)
	if m, ok := s.postings[0].(Measurer); ok {
		if threads > 1 {
			return Answer{}, fmt.Errorf("it measures with one thread: %w", ErrUnsupported)
		}
		took, err := m.Measure(context.Background())
		return Answer{Samples: []int64{int64(took)}, Ops: 1, NS: int64(took)}, err
	}
	if threads > len(s.postings) {
		return Answer{}, fmt.Errorf("%d threads for %d requests: %w", threads, len(s.postings),
			ErrUnsupported)
	}
	if _, ok := s.postings[0].(Resetter); ok && threads > 1 {
		return Answer{}, fmt.Errorf("it posts one operation at a time: %w", ErrUnsupported)
	}
	samples, errs := make([][]int64, threads), make([]error, threads)
	var resets time.Duration // of a Resetter, which has one thread
	after := s.next
	begin := time.Now()
	post := func(t int) {
		list := make([]int64, 0, 1<<16)
		for i := t + s.next*threads; ; i += threads {
			p := s.postings[i%(len(s.postings)/threads*threads)]
			start := time.Since(begin)
			if reset, ok := p.(Resetter); ok {
				if errs[t] = reset.Reset(context.Background()); errs[t] != nil {
					return
				}
				resets += time.Since(begin) - start
				start = time.Since(begin)
			}
			if errs[t] = p.Post(context.Background()); errs[t] != nil {
				return
			}
			end := time.Since(begin)
			list = append(list, int64(end-start))
			if int64(end) >= r.NS && len(list) >= r.Least {
				samples[t] = list
				if t == 0 {
					after = i/threads + 1
				}
				return
			}
		}
	}
	var others sync.WaitGroup
	for t := 1; t < threads; t++ {
		others.Go(func() { post(t) })
	}
	post(0)
	others.Wait()
	took := time.Since(begin) - resets
	s.next = after
	if err := errors.Join(errs...); err != nil {
		return Answer{}, err
	}
	all := slices.Concat(samples...)
	a := Answer{Ops: len(all), NS: int64(took), Samples: thin(all)}
	if e, ok := s.end.(Remarker); ok {
		a.Text = e.Remark()
	}
	return a, nil
}

// thin keeps every second, third and so on of too many samples.
func thin(samples []int64) []int64 {
	step := max((len(samples)+samplesMax-1)/samplesMax, 1)
	kept := samples[:0]
	for i := 0; i < len(samples); i += step {
		kept = append(kept, samples[i])
	}
	return kept
}

// slot returns the bytes of a slot: a part of the memory, or a copy of a part of the file.
func (s *server) slot(r *Request, slot int32) ([]byte, error) {
	at := uint64(slot) * r.Size
	if r.Far {
		return s.end.(Alone).Far()[at:][:r.Size], nil
	}
	keeper, ok := s.end.(Keeper)
	if !ok {
		return s.end.Memory()[at:][:r.Size], nil
	}
	b := make([]byte, r.Size)
	_, err := keeper.ReadAt(b, int64(at))
	return b, err
}

// stampBytes is the length of a stamp. Shorter pieces are not checked.
const stampBytes = 8

func (s *server) stamp(r *Request) error {
	if r.Size < stampBytes {
		return fmt.Errorf("stamp slots of %d bytes: %w", r.Size, ErrUnsupported)
	}
	for _, slot := range r.Slots {
		b, err := s.slot(r, slot)
		if err != nil {
			return err
		}
		binary.LittleEndian.PutUint64(b, r.Seed)
		if keeper, ok := s.end.(Keeper); ok && !r.Far {
			if _, err := keeper.WriteAt(b[:8], int64(slot)*int64(r.Size)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *server) digest(r *Request) (a Answer, err error) {
	for _, slot := range r.Slots {
		b, err := s.slot(r, slot)
		if err != nil {
			return a, err
		}
		a.CRC = crc32.Update(a.CRC, crc32.IEEETable, b)
	}
	return a, nil
}

func (s *server) cache(all bool) error {
	keeper, ok := s.end.(Keeper)
	if !ok {
		return fmt.Errorf("it keeps no file: %w", ErrUnsupported)
	}
	return keeper.Cache(all)
}

func (s *server) ping(r *Request) (Answer, error) {
	message := make([]byte, r.Size)
	samples := make([]int64, 0, r.Count)
	for range r.Count {
		begin := time.Now()
		if err := s.end.Notify(message); err != nil {
			return Answer{}, err
		}
		if err := s.await(); err != nil {
			return Answer{}, err
		}
		samples = append(samples, int64(time.Since(begin)))
	}
	return Answer{Samples: thin(samples), Ops: r.Count}, nil
}

func (s *server) pong(r *Request) error {
	message := make([]byte, r.Size)
	for range r.Count {
		if err := s.await(); err != nil {
			return err
		}
		if err := s.end.Notify(message); err != nil {
			return err
		}
	}
	return nil
}

func (s *server) await() error {
	for {
		if ok, err := s.end.Receive(); ok || err != nil {
			return err
		}
	}
}
