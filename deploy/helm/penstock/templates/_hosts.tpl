{{/* A model that several hosts share: the parts of a LeaderWorkerSet. */}}

{{- define "penstock.hasHosts" -}}
{{- if gt (int .Values.hosts.size) 1 -}}true{{- end -}}
{{- end -}}

{{- define "penstock.joinSecret" -}}
{{- default (printf "%s-join" (include "penstock.fullname" .)) .Values.hosts.token.secret -}}
{{- end -}}

{{/* The token of the Secret that exists; otherwise a new one. */}}
{{- define "penstock.joinToken" -}}
{{- $found := lookup "v1" "Secret" .Release.Namespace (include "penstock.joinSecret" .) | default dict -}}
{{- dig "data" .Values.hosts.token.key "" $found | default (randAlphaNum 64 | b64enc) -}}
{{- end -}}

{{/*
The numbers of ranks, as YAML: those that share each matrix, and the stages that share the layers. By default each host
is a stage, whose GPUs share its matrices. If flags set one of the two, the other one is what remains.
*/}}
{{- define "penstock.parallelism" -}}
{{- $tensor := int (get .Values.flags "tensor-parallel-size") -}}
{{- $pipeline := int (get .Values.flags "pipeline-parallel-size") -}}
{{- $gpus := max 1 (int .Values.gpu.count) -}}
{{- $ranks := mul $gpus (int .Values.hosts.size) -}}
{{- if not (or $tensor $pipeline) -}}
{{- $tensor = $gpus -}}
{{- end -}}
{{- if not $pipeline -}}
{{- $pipeline = div $ranks $tensor | max 1 -}}
{{- else if not $tensor -}}
{{- $tensor = div $ranks $pipeline | max 1 -}}
{{- end -}}
{tensor: {{ $tensor }}, pipeline: {{ $pipeline }}}
{{- end -}}

{{/* LeaderWorkerSet's controller puts its own variables before these. */}}
{{- define "penstock.leaderEnv" -}}
{{- $parallelism := include "penstock.parallelism" . | fromYaml -}}
- {name: PENSTOCK_SERVE_NNODES, value: $(LWS_GROUP_SIZE)}
- {name: PENSTOCK_SERVE_NODE_RANK, value: $(LWS_WORKER_INDEX)}
- {name: PENSTOCK_SERVE_MASTER_ADDR, value: {{ .Values.host | quote }}}
- {name: PENSTOCK_SERVE_MASTER_PORT, value: {{ .Values.hosts.port | toJson | quote }}}
- {name: PENSTOCK_SERVE_JOIN_TOKEN_FILE, value: /etc/penstock/join/token}
{{- if .Values.hosts.tls.secret }}
- {name: PENSTOCK_SERVE_JOIN_TLS_CA, value: /etc/penstock/join-tls/ca.crt}
- {name: PENSTOCK_SERVE_JOIN_TLS_CERT, value: /etc/penstock/join-tls/tls.crt}
- {name: PENSTOCK_SERVE_JOIN_TLS_KEY, value: /etc/penstock/join-tls/tls.key}
{{- end }}
{{- if not (hasKey .Values.flags "join-timeout") }}
# As long as the startup probe: a worker may have to download the model.
- {name: PENSTOCK_SERVE_JOIN_TIMEOUT, value: {{ include "penstock.startupSeconds" . | quote }}}
{{- end }}
{{- if not (hasKey .Values.flags "tensor-parallel-size") }}
- {name: PENSTOCK_SERVE_TENSOR_PARALLEL_SIZE, value: {{ $parallelism.tensor | toJson | quote }}}
{{- end }}
{{- if not (hasKey .Values.flags "pipeline-parallel-size") }}
- {name: PENSTOCK_SERVE_PIPELINE_PARALLEL_SIZE, value: {{ $parallelism.pipeline | toJson | quote }}}
{{- end }}
{{- end -}}

{{/* The container of a worker. It has no ports and no probes: it serves nothing, and finds out by itself if the leader
is lost. */}}
{{- define "penstock.worker" -}}
- name: penstock
  image: {{ include "penstock.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [penstock, worker]
  args:
    - --join=$(LWS_LEADER_ADDRESS):{{ .Values.hosts.port }}
    - --node-rank=$(LWS_WORKER_INDEX)
    - --join-token-file=/etc/penstock/join/token
    {{- if .Values.hosts.tls.secret }}
    - --join-tls-ca=/etc/penstock/join-tls/ca.crt
    - --join-tls-cert=/etc/penstock/join-tls/tls.crt
    - --join-tls-key=/etc/penstock/join-tls/tls.key
    {{- end }}
    # The other flags are the leader's.
    {{- range list "threads" "cpu-pinning" "collective-interface" "log-level" "log-format" }}
    {{- if hasKey $.Values.flags . }}
    - --{{ . }}={{ get $.Values.flags . }}
    {{- end }}
    {{- end }}
    {{- with .Values.hosts.workerArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  env:
    {{- include "penstock.modelEnv" . | nindent 4 }}
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- include "penstock.resources" . | nindent 4 }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  volumeMounts:
    {{- include "penstock.mounts" . | nindent 4 }}
{{- end -}}

{{- define "penstock.joinVolumes" -}}
- name: join
  secret:
    secretName: {{ include "penstock.joinSecret" . }}
    defaultMode: 0440
    items: [{key: {{ .Values.hosts.token.key }}, path: token}]
{{- with .Values.hosts.tls.secret }}
- name: join-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* Values that are valid by themselves, but not with this number of hosts. */}}
{{- define "penstock.checkHosts" -}}
{{- $v := .Values -}}
{{- $size := int $v.hosts.size -}}
{{- if include "penstock.hasHosts" . -}}
{{- $parallelism := include "penstock.parallelism" . | fromYaml -}}
{{- $ranks := mul (int $parallelism.tensor) (int $parallelism.pipeline) -}}
{{- $gpus := mul (int $v.gpu.count) $size -}}
{{- if and $gpus (ne $ranks $gpus) -}}
{{- fail (printf "hosts.size: the %d hosts have %d GPUs, and each needs a rank; set flags.tensor-parallel-size and flags.pipeline-parallel-size so that their product is %d, or only one of them" $size $gpus $gpus) -}}
{{- end -}}
{{- if mod $ranks $size -}}
{{- fail (printf "hosts.size: %d hosts cannot have equal parts of %d ranks; set flags.tensor-parallel-size and flags.pipeline-parallel-size so that %d divides their product" $size $ranks $size) -}}
{{- end -}}
{{- if ne $v.strategy.type "RollingUpdate" -}}
{{- fail "strategy.type: a LeaderWorkerSet has only RollingUpdate; with hosts.size above 1, set that, and strategy.rollingUpdate" -}}
{{- end -}}
{{- if $v.modelCache.persistence.annotations -}}
{{- fail "modelCache.persistence.annotations: a LeaderWorkerSet drops them; with hosts.size above 1, leave them out" -}}
{{- end -}}
{{- if and $v.podDisruptionBudget.enabled (kindIs "string" $v.podDisruptionBudget.maxUnavailable) -}}
{{- fail "podDisruptionBudget.maxUnavailable: a percentage counts pods, not groups; with hosts.size above 1, set a number" -}}
{{- end -}}
{{- if gt (len (include "penstock.workload" .)) 48 -}}
{{- fail (printf "fullnameOverride: the name %s is too long for the pods of a LeaderWorkerSet; with hosts.size above 1, set one of at most 42 characters" (include "penstock.fullname" .)) -}}
{{- end -}}
{{- else -}}
{{- range list "join-timeout" "join-allow" "collective-interface" -}}
{{- if hasKey $v.flags . -}}
{{- fail (printf "flags.%s: is for several hosts; set hosts.size to 2 or more, or leave it out" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
