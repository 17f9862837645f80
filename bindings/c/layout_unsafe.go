// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"fmt"
	"reflect"
	"strings"
	"unsafe"

	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/sparse"
)

// goLayout is what Go makes of the structs that it reads in place, as the C compiler
// describes them: "struct.field" -> "offset size", "struct" -> "size".
func goLayout() map[string]string {
	list := map[string]string{}
	for name, v := range map[string]any{
		"sluice_backend": C.struct_sluice_backend{}, "sluice_config": C.struct_sluice_config{},
		"sluice_alloc_options": C.struct_sluice_alloc_options{},
		"sluice_segment":       C.struct_sluice_segment{},
		"sluice_desc":          C.struct_sluice_desc{}, "sluice_pages": C.struct_sluice_pages{},
		"sluice_completion":    C.struct_sluice_completion{},
		"sluice_notification":  C.struct_sluice_notification{},
		"sluice_lease_options": C.struct_sluice_lease_options{},
		"sluice_route":         C.struct_sluice_route{},
		"sluice_loop":          C.struct_sluice_loop{}, "sluice_side": C.struct_sluice_side{},
		"sluice_pattern":              C.struct_sluice_pattern{},
		"sluice_kv_key":               C.struct_sluice_kv_key{},
		"sluice_kv_namespace_options": C.struct_sluice_kv_namespace_options{},
		"sluice_kv_axis":              C.struct_sluice_kv_axis{},
		"sluice_kv_place":             C.struct_sluice_kv_place{},
		"sluice_kv_hint_result":       C.struct_sluice_kv_hint_result{},
		"sluice_kv_estimate":          C.struct_sluice_kv_estimate{},
		"sluice_handoff_config":       C.struct_sluice_handoff_config{},
		"sluice_handoff_table":        C.struct_sluice_handoff_table{},
		"sluice_ring_config":          C.struct_sluice_ring_config{},
		"sluice_ring_handle":          C.struct_sluice_ring_handle{},
		"sluice_ring_part":            C.struct_sluice_ring_part{},
		"sluice_sparse_config":        C.struct_sluice_sparse_config{},
		"sluice_sparse_batch":         C.struct_sluice_sparse_batch{},
	} {
		s := reflect.TypeOf(v)
		list[name] = fmt.Sprint(s.Size())
		for i := range s.NumField() {
			f := s.Field(i)
			list[name+"."+f.Name] = fmt.Sprint(f.Offset, f.Type.Size())
		}
	}
	for o := cache.Undone; o <= cache.Busy; o++ {
		name := strings.ToUpper(strings.ReplaceAll(o.String(), " ", "_"))
		list["SLUICE_KV_"+name] = fmt.Sprint(int(o))
	}
	for name, value := range map[string]any{"SESSION_END": cache.HintSessionEnd,
		"RETAIN": cache.HintRetain, "RELEASE": cache.HintRelease, "DEMOTE": cache.HintDemote,
		"PREFETCH": cache.HintPrefetch} {
		list["SLUICE_KV_"+name] = fmt.Sprintf("%d", value)
	}
	for o := cache.WriteThrough; o <= cache.MemoryOnly; o++ {
		name := strings.ToUpper(strings.ReplaceAll(o.String(), "-", "_"))
		list["SLUICE_KV_"+name] = fmt.Sprint(int(o))
	}
	list["SLUICE_KV_IN_MEMORY"] = fmt.Sprint(int(cache.InMemory))
	list["SLUICE_KV_ON_DISK"] = fmt.Sprint(int(cache.OnDisk))
	list["SLUICE_KV_COMING"] = fmt.Sprint(int(cache.Coming))
	list["SLUICE_SPARSE_NONE"] = fmt.Sprint(sparse.None)
	list["SLUICE_ABI_VERSION"] = fmt.Sprint(C.SLUICE_ABI_VERSION)
	return list
}

// A Go array of handles or indices is what C has.
const (
	_ = uint(unsafe.Sizeof(C.sluice_region(0)) - unsafe.Sizeof(uint64(0)))
	_ = uint(unsafe.Sizeof(uint64(0)) - unsafe.Sizeof(C.sluice_region(0)))
)
