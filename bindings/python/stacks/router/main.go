// SPDX-License-Identifier: Apache-2.0

// Router follows the events of a cache with the libraries that llm-d's indexer follows those of
// vLLM with: go-zeromq/zmq4, without its own way to connect again, and vmihailenco/msgpack. It asks
// for what it has missed as that does. To each line on its standard input it answers with what it
// knows, as JSON.
//
//	router tcp://EVENTS tcp://REPLAY
package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"
)

const (
	again = 100 * time.Millisecond // until it connects again
	idle  = 30 * time.Second       // a replay that sends nothing for so long has failed
)

// batch is vLLM's KVEventBatch.
type batch struct {
	_msgpack struct{} `msgpack:",as_array"`
	TS       float64
	Events   []msgpack.RawMessage
	Rank     *int
}

// event has what the three kinds of events have of use here.
type event struct {
	Type   string   `msgpack:"type"`
	Hashes [][]byte `msgpack:"block_hashes"`
	Tokens []uint32 `msgpack:"token_ids"`
	Size   *int     `msgpack:"block_size"`
	Medium string   `msgpack:"medium"`
}

type router struct {
	events, replay string

	mu      sync.Mutex        // guards what follows
	held    map[string]string // media by hashes in hex
	last    uint64            // number of the last batch
	cleared int
	wrong   string // an event that the indexer would refuse
}

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: router tcp://EVENTS tcp://REPLAY")
	}
	r := &router{events: os.Args[1], replay: os.Args[2], held: map[string]string{}}
	ctx, end := context.WithCancel(context.Background())
	defer end()
	go r.run(ctx)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		r.mu.Lock()
		text, err := json.Marshal(map[string]any{"held": r.held, "cleared": r.cleared,
			"wrong": r.wrong})
		r.mu.Unlock()
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(string(text))
	}
}

// run connects, and again where the connection ends.
func (r *router) run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := r.follow(ctx); err != nil {
			log.Print(err)
		}
		time.Sleep(again)
	}
}

func (r *router) follow(ctx context.Context) error {
	sub := zmq4.NewSub(ctx)
	defer sub.Close()
	if err := sub.Dial(r.events); err != nil {
		return err
	}
	if err := sub.SetOption(zmq4.OptionSubscribe, "kv@"); err != nil {
		return err
	}
	if err := r.missed(ctx, 0); err != nil { // it has the whole state, as after a start
		return err
	}
	for {
		msg, err := sub.Recv()
		if err != nil {
			return err
		}
		number, err := numberOf(msg.Frames)
		if err != nil {
			return err
		}
		if number > r.last+1 {
			if err := r.missed(ctx, r.last+1); err != nil {
				return err
			}
		}
		if number > r.last {
			r.take(number, msg.Frames[2])
		}
	}
}

func numberOf(frames [][]byte) (uint64, error) {
	if len(frames) != 3 || len(frames[1]) != 8 {
		return 0, fmt.Errorf("a message of %d frames: want a topic, 8 bytes and a batch",
			len(frames))
	}
	return binary.BigEndian.Uint64(frames[1]), nil
}

// missed takes a replay from a number on.
func (r *router) missed(ctx context.Context, from uint64) error {
	ctx, end := context.WithCancel(ctx)
	defer end()
	dealer := zmq4.NewDealer(ctx, zmq4.WithTimeout(idle))
	defer dealer.Close()
	if err := dealer.Dial(r.replay); err != nil {
		return err
	}
	ask := zmq4.NewMsgFrom(nil, binary.BigEndian.AppendUint64(nil, from))
	if err := dealer.SendMulti(ask); err != nil {
		return err
	}
	limit := time.AfterFunc(idle, end)
	defer limit.Stop()
	for expected := from; ; {
		msg, err := dealer.Recv()
		if err != nil {
			return err
		}
		limit.Reset(idle)
		frames := msg.Frames
		if len(frames) > 0 && len(frames[0]) == 0 {
			frames = frames[1:]
		}
		if len(frames) == 3 && len(frames[2]) == 0 {
			return nil
		}
		number, err := numberOf(frames)
		if err != nil {
			return err
		}
		if expected != from && number != expected {
			return fmt.Errorf("a replay has batch %d behind %d", number, expected-1)
		}
		r.take(number, frames[2])
		expected = number + 1
	}
}

func (r *router) take(number uint64, payload []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last = number
	var b batch
	if err := msgpack.Unmarshal(payload, &b); err != nil {
		r.wrong = err.Error()
		return
	}
	for _, raw := range b.Events {
		var e event
		if err := msgpack.Unmarshal(raw, &e); err != nil {
			r.wrong = err.Error()
			return
		}
		r.apply(e)
	}
}

func (r *router) apply(e event) {
	switch {
	case e.Type == "AllBlocksCleared":
		clear(r.held)
		r.cleared++
	case e.Type == "BlockStored" && e.Tokens != nil && e.Size != nil && e.Medium != "":
		for _, h := range e.Hashes {
			r.held[hex.EncodeToString(h)] = e.Medium
		}
	case e.Type == "BlockRemoved" && e.Medium != "":
		for _, h := range e.Hashes {
			if key := hex.EncodeToString(h); r.held[key] == e.Medium {
				delete(r.held, key)
			}
		}
	default:
		r.wrong = fmt.Sprintf("an event %q without what the indexer needs of it", e.Type)
	}
}
