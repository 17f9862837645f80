// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cluster"
)

// kvToken is one answer of a cluster for several ranks, in the process that has asked.
type kvToken struct {
	of *kv
	t  *cluster.Token
}

// ofCluster returns the namespace of a cluster.
func (n *namespace) ofCluster() (clusterSpace, error) {
	if s, is := n.space.(clusterSpace); is {
		return s, nil
	}
	return clusterSpace{}, fmt.Errorf("tokens are of a cluster: retain the blocks instead: %w",
		engine.ErrNotSupported)
}

// adoptToken gives a token its handle, which the end of the cache makes stale.
func (k *kv) adoptToken(t *cluster.Token) (uint64, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.over {
		return 0, engine.ErrClosed
	}
	return tokens.put(&kvToken{k, t})
}

//export slgoKVMatchPinned
func slgoKVMatchPinned(h C.uint64_t, list *C.struct_sluice_kv_key, count, chains C.size_t,
	ttl, timeout C.int64_t, out *C.uint64_t, prefix *C.size_t, f *C.struct_slgo_fault) C.int {
	return onSpace(h, timeout, f, func(ctx context.Context, n *namespace) error {
		s, err := n.ofCluster()
		if err != nil {
			return err
		}
		if count > C.SLUICE_KV_KEYS_MAX || chains == 0 || chains > C.SLUICE_KV_CHAINS_MAX {
			return fmt.Errorf("%d chains of %d keys: at most %d, and %d keys each: %w",
				uint64(chains), uint64(count), C.SLUICE_KV_CHAINS_MAX, C.SLUICE_KV_KEYS_MAX,
				engine.ErrBounds)
		}
		keys, err := inPlace[cache.Key](list, uint64(chains*count), "keys")
		if err != nil {
			return err
		}
		of := make([][]cache.Key, chains)
		for i := range of {
			of[i] = keys[i*int(count):][:count]
		}
		t, err := s.MatchPinned(ctx, time.Duration(ttl), of...)
		if err != nil {
			return err
		}
		handle, err := n.of.adoptToken(t)
		if err != nil {
			_ = t.Close() // the error of before says why
			return err
		}
		*out, *prefix = C.uint64_t(handle), C.size_t(t.Prefix)
		return nil
	})
}

//export slgoKVTokenBytes
func slgoKVTokenBytes(h C.uint64_t, buffer *C.uint8_t, capacity C.size_t, length *C.size_t,
	f *C.struct_slgo_fault) C.int {
	t, err := tokens.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	return hand(t.t.Bytes(), buffer, capacity, length, f)
}

//export slgoKVTokenClose
func slgoKVTokenClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return calling(&tokens, h, 0, f, func(_ context.Context, t *kvToken) error {
		if !tokens.drop(uint64(h)) {
			return &staleError{want: kindKVToken, handle: uint64(h)}
		}
		_ = t.t.Close() // a node that does not answer lets go by the time of the pins
		return nil
	})
}

//export slgoKVLoadPinned
func slgoKVLoadPinned(h C.uint64_t, text *C.uint8_t, size, chain C.size_t,
	list *C.struct_sluice_kv_key, count C.size_t, place *C.struct_sluice_kv_place,
	timeout C.int64_t, out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	return withKeys(h, list, count, 0, f, func(_ context.Context, n *namespace,
		keys []cache.Key) error {
		s, err := n.ofCluster()
		if err != nil {
			return err
		}
		b, err := inPlace[byte](text, uint64(size), "token")
		if err != nil {
			return err
		}
		t, err := cluster.ParseToken(b)
		if err != nil {
			return err
		}
		region, err := n.of.region(place.region)
		if err != nil {
			return err
		}
		at, err := placeOf(place, len(keys))
		if err != nil {
			return err
		}
		at.Region, keys = region, slices.Clone(keys) // the caller's are read during the call alone
		return n.start(len(keys), region, timeout, out, func(ctx context.Context) (
			[]cache.Outcome, error) {
			if err := s.LoadPinned(ctx, t, int(min(chain, C.SLUICE_KV_CHAINS_MAX)), keys,
				at); err != nil {
				return nil, err
			}
			return slices.Repeat([]cache.Outcome{cache.Done}, len(keys)), nil
		})
	})
}
